#!/usr/bin/env bash
# Downloads what the trainer and its tests need on a machine that has Python 3.12 and a torch for its
# GPU, and reaches nothing from where it stands: wheels, into build/gpu-wheels, which git ignores.
#
#   scripts/gpu_wheels.sh                        # without torch and what belongs to it
#   scripts/gpu_wheels.sh --have "numpy scipy"   # without these either, which the machine has
#   scripts/gpu_wheels.sh --engine 0.26.0        # and that release of vLLM, which must fit its torch
#
# Versions are those of constraints/gpu.txt; beside another release of vLLM, those of them that it
# takes. Wheels of more than 60 MiB are cut into pieces, for a way there that takes no more at once.
set -euo pipefail
cd "$(dirname "$0")/.."

have= engine=
while [ $# -gt 0 ]; do
  case $1 in
    --have) have=$2 ;;
    --engine) engine=$2 ;;
    *) echo "gpu_wheels: what is $1? Known are --have NAMES and --engine VERSION" >&2; exit 1 ;;
  esac
  shift 2
done
python=.venv/bin/python
folder=build/gpu-wheels
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

"$python" - > "$work/wanted.in" <<'PYTHON'
import tomllib
project = tomllib.load(open("pyproject.toml", "rb"))
tests = {"hypothesis", "pytest", "pytest-asyncio", "pytest-timeout", "pytest-xdist"}
wanted = [*project["project"]["dependencies"], *project["project"]["optional-dependencies"]["trainer"]]
wanted += [each for each in project["dependency-groups"]["dev"] if each.split(">")[0] in tests]
print("\n".join(each for each in wanted if not each.startswith("torch")))
PYTHON
[ -z "$engine" ] || echo "vllm==$engine" >> "$work/wanted.in"

cp constraints/gpu.txt "$work/list.txt"  # uv keeps the versions of a file that it writes again
.venv/bin/uv pip compile --quiet --python-version 3.12 --python-platform x86_64-manylinux_2_28 \
  --no-annotate --no-header --no-emit-index-url "$work/wanted.in" -o "$work/list.txt"
# The machine's torch, and what comes with it. (nvidia-ml-py is no part of it.)
left_out='torch|torchaudio|torchvision|torchcodec|triton|cuda-[a-z]*|nvidia-[^m].*'
for name in $have; do left_out="$left_out|$name"; done
grep -v -i -E "^($left_out)==" "$work/list.txt" > "$work/kept.txt"

platforms=()
for minor in $(seq 5 39); do platforms+=(--platform "manylinux_2_${minor}_x86_64"); done
for old in 1 2010 2014; do platforms+=(--platform "manylinux${old}_x86_64"); done
rm -rf "$folder"
mkdir -p "$folder"
"$python" -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: \
  --python-version 3.12 --implementation cp "${platforms[@]}" --dest "$folder" -r "$work/kept.txt"

find "$folder" -name '*.whl' -size +60M | while read -r wheel; do
  split --bytes=60M --numeric-suffixes "$wheel" "$wheel.piece-"
  rm "$wheel"
done
du --human-readable --apparent-size --summarize "$folder"
cat <<TEXT
On the machine, in the root of the project:
TEXT
if compgen -G "$folder/*.piece-00" > /dev/null; then
  cat <<TEXT
  for first in $folder/*.piece-00; do cat "\${first%00}"?? > "\${first%.piece-00}"; done
TEXT
fi
cat <<TEXT
  python3 -m pip install --no-index --no-deps --target build/gpu-site $folder/*.whl
  PYTHONPATH=build/gpu-site python3 -m tests.gpu --junitxml build/report.xml
  PYTHONPATH=build/gpu-site python3 -m benchmarks.gpu --output build/results
TEXT
