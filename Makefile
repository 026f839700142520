ON_POSTGRESQL = audit checkpoints copies custom_loss_gateway identity keys long_lists openai_models operations owners \
	record report restarted restored retention run_history search security_names sessions stopped_runs trace usage_summary
JOBS = $(if $(shell grep -s '^gpu' .venv/.tandem-setup),0,2)

.PHONY: setup setup-trl images secrets demo demo-cluster demo-compose first-hour test test-all test-cluster test-compose test-gpu test-nfs test-postgresql conformance lint bench bench-beats bench-bombs bench-cluster bench-gateway bench-gpu bench-head bench-history bench-in-flight bench-joint bench-memory bench-methods bench-overlap bench-page bench-recorder bench-recovery bench-rerun bench-rollouts bench-shared bench-starts bench-takeover bench-timeslice bench-tracking bench-trl bench-versus chaos fuzz nightly api-docs protos clean
.DEFAULT_GOAL := help

help:            ## Lists the targets.
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 17

setup:           ## Makes .venv and installs Tandem into it; quick when nothing changed.
	@scripts/setup.sh
	@case " $(MAKECMDGOALS) " in *" setup "*) echo "Tandem is set up. Next: make demo, or .venv/bin/tandem up --model NAME=FOLDER (see README.md)" ;; esac

setup-trl: setup ## Makes .venv/trl, the environment of TRL jobs.
	@scripts/trl.sh

demo: setup      ## Trains a small policy by reinforcement learning, on real parts. ARGS="--seed 1"
	@.venv/bin/tandem demo $(ARGS)

demo-compose: setup ## Does the demo against the containers of docker-compose.yaml, which must run.
	@scripts/demo_compose.sh $(ARGS)

images:          ## Builds the images of Kubernetes. REGISTRY=… TAG=… BUILD=gpu pushes them; LOAD=kind
	@scripts/images.sh

secrets: setup   ## Makes the secrets of an overlay. OVERLAY=k8s/overlays/cpu-dev
	@scripts/secrets.sh

demo-cluster: setup ## Does the demo on kubectl's cluster, with an applied overlay.
	@scripts/demo_cluster.sh $(ARGS)

first-hour:      ## Follows the README in a fresh clone, and times each step. PYTHON=python3.12
	@python3 scripts/first_hour.py $(ARGS)

test: setup      ## Runs the tests, in two processes (with a GPU, in one). JOBS=0 ARGS="-x -k publish"
	@.venv/bin/python -m pytest -n $(JOBS) -m "not nightly and not slow" $(ARGS)

test-all: setup  ## Runs all tests except the nightly ones, as CI does, and prints the slowest.
	@scripts/cookbook.sh
	@scripts/triton.sh
	@scripts/kubeflow.sh
	@scripts/trl.sh
	@.venv/bin/python -m pytest -n $(JOBS) --durations 40 $(ARGS)

test-postgresql: setup ## Runs tests of whole gateways on PostgreSQL, which must be installed.
	@TANDEM_TEST_DATABASE=postgresql .venv/bin/python -m pytest -n $(JOBS) $(addprefix tests/component/gateway/test_,$(addsuffix .py,$(ON_POSTGRESQL))) $(ARGS)

test-compose: setup ## Builds docker-compose.yaml, starts it and kills each container. Needs Docker, debootstrap and root.
	@.venv/bin/python -m tests.compose $(ARGS)

test-gpu: setup  ## Runs the tests for an NVIDIA GPU. ARGS="-k trainer"
	@.venv/bin/python -m tests.gpu $(ARGS)

test-nfs: setup  ## Publishes on NFS between emulated machines whose server restarts. Needs qemu. ARGS="--rounds 100"
	@.venv/bin/python -m tests.nfs $(ARGS)

test-cluster: setup ## Runs launcher and stack on a real cluster. KUBECONFIG=… or TANDEM_TEST_BINARIES=…; see docs/design/kubernetes.md
	@.venv/bin/python -m tests.cluster $(ARGS)

conformance: setup ## Checks every public method of the SDK against its documented meaning. SDK=0.27.2
	@$(if $(SDK),scripts/conformance.sh $(SDK),.venv/bin/python -m pytest tests/conformance) $(ARGS)

lint: setup      ## ruff, mypy (strict), import-linter; zizmor and actionlint for the workflows.
	@.venv/bin/ruff check .
	@.venv/bin/ruff format --check .
	@.venv/bin/mypy
	@.venv/bin/lint-imports
	@.venv/bin/zizmor --offline --pedantic --quiet .github
	@scripts/actionlint.sh

bench: setup     ## Measures Tandem beside its floor, in one run; writes benchmarks/results/.
	@.venv/bin/python -m benchmarks $(ARGS)

bench-beats: setup ## Measures heartbeats and healthz beside 5,000 samples. ARGS=../other-checkout
	@PYTHONPATH=. .venv/bin/python benchmarks/beats.py $(ARGS)

bench-cluster: setup ## Measures the launcher of pods with 1,000 sessions. ARGS="--sessions 100"
	@.venv/bin/python -m benchmarks.cluster $(ARGS)

bench-gateway: setup ## Measures a gateway under 1,000 sessions and 64 samplers. ARGS="--quick"
	@.venv/bin/python -m benchmarks.gateway_load $(ARGS)

bench-gpu: setup ## Measures each goal on a GPU. ARGS="--junitxml report.xml" runs the tests of test-gpu, too
	@.venv/bin/python -m benchmarks.gpu $(ARGS)

bench-head: setup ## Measures the head of a model, from hidden states to gradients, eager and compiled.
	@.venv/bin/python -m benchmarks.head

bench-history: setup ## Measures a gateway with 10 million past operations, before and after retention.
	@.venv/bin/python -m benchmarks.history $(ARGS)

bench-in-flight: setup ## Measures a gateway with 131,072 samples in flight. ARGS=../other-checkout
	@PYTHONPATH=. .venv/bin/python benchmarks/in_flight.py $(ARGS)

bench-joint: setup ## Measures LoRA runs in one pass beside a pass for each. ARGS="--runs 4"
	@.venv/bin/python -m benchmarks.joint_passes $(ARGS)

bench-memory: setup ## Measures a trainer's memory by vocabulary, length, checkpointing and ranks. ARGS=--quick
	@.venv/bin/python -m benchmarks.memory $(ARGS)

bench-methods: setup-trl ## Trains SFT, DPO, KTO and GRPO with both backends on three seeds. ARGS="--methods sft"
	@.venv/bin/python -m benchmarks.methods $(ARGS)

bench-overlap: setup ## Measures a loop one step ahead beside the synchronous one, on a core for each worker.
	@.venv/bin/python -m benchmarks.overlap $(ARGS)

bench-page: setup ## Measures the pages in chromium beside a plain page. ARGS="--rounds 5"
	@.venv/bin/python -m benchmarks.page $(ARGS)

bench-recorder: setup ## Measures the cost of recording a turn of a chat.
	@.venv/bin/python -m benchmarks.recorder $(ARGS)

bench-recovery: setup ## Measures snapshots, and the pause of a run whose trainer is killed.
	@.venv/bin/python -m benchmarks.recovery $(ARGS)

bench-rollouts: setup ## Measures a loop with 10,000 rollouts in flight: its memory and its event loop's lag.
	@.venv/bin/python -m benchmarks.rollouts $(ARGS)

bench-rerun: setup ## Measures the time to the first reward after a change of the reward. ARGS=--compose
	@.venv/bin/python -m benchmarks.rerun $(ARGS)

bench-starts: setup ## Measures starts of workers in new processes and in idle ones. ARGS="--rounds 5"
	@.venv/bin/python -m benchmarks.starts $(ARGS)

bench-takeover: setup ## Measures a client's pause when a standby takes over. ARGS=../other-checkout
	@.venv/bin/python -m benchmarks.takeover $(ARGS)

bench-timeslice: setup ## Measures experiments that share devices, beside the same experiments in a row.
	@.venv/bin/python -m benchmarks.timeslice $(ARGS)

bench-tracking: setup ## Measures the demo's RL step with and without a record. ARGS="--rounds 4"
	@.venv/bin/python -m benchmarks.tracking $(ARGS)

bench-trl: setup-trl ## Measures GRPO beside TRL's, on one task in one run. ARGS="--steps 20"
	@.venv/bin/python -m benchmarks.trl_grpo $(ARGS)

bench-shared: setup ## Measures LoRA runs that share workers, and sessions that share an engine.
	@.venv/bin/python -m benchmarks.shared_lora $(ARGS)

bench-versus: setup ## Measures this checkout beside another one. ARGS=../other-checkout
	@.venv/bin/python -m benchmarks.versus $(ARGS)

bench-bombs: setup ## Measures healthz beside clients with compressed bombs. ARGS=../other-checkout
	@.venv/bin/python -m benchmarks.bombs $(ARGS)

fuzz: setup      ## Sends the gateway malformed requests. ARGS="--requests 100000 --seed 1"
	@.venv/bin/python -m tests.fuzz $(ARGS)

chaos: setup     ## Kills and freezes processes, cuts connections and fills disks under experiments. ARGS="--faults 10 --seed 1 --ranks 2"
	@.venv/bin/python -m tests.chaos $(ARGS)

nightly: setup   ## Runs the longest tests: cookbook recipes, 90 faults, engines of all architectures and in their own processes, 100,000 fuzzed requests.
	@scripts/cookbook.sh
	@scripts/triton.sh
	@scripts/kubeflow.sh
	@scripts/kserve.sh
	@scripts/environments.sh
	@scripts/axe.sh
	@scripts/trl.sh
	@.venv/bin/python -m pytest -m nightly
	@TANDEM_SAMPLER_ENGINE_PROCESS=on .venv/bin/python -m pytest tests/component/sampler
	@.venv/bin/python -m tests.fuzz --requests 100000 --seed "$$(date +%Y%m%d)" $(ARGS)

api-docs: setup  ## Writes docs/api.md from the application's routes.
	@.venv/bin/python -m scripts.api_docs

protos: setup    ## Regenerates the stubs from protos/.
	@scripts/protos.sh

clean:           ## Removes builds and data of runs.
	rm -rf .venv .tandem runs build *.egg-info
