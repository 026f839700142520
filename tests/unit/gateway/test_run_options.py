"""Options in the metadata of runs and sessions."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gateway.workers.groups import WorkerGroup
from gateway.workers.run_options import check_defaults, options_of
from tandem.errors import InvalidRequest, PermissionDenied
from tandem.protocol.worker import Layout, LoraSpec, TrainingSpec
from tandem.settings.gateway import GatewaySettings
from tandem.settings.sharing import Sharing

FULL = TrainingSpec()
SETTINGS = GatewaySettings(model_defaults={"large": {"ranks": 2, "memory": "40GiB"}})
GROUPS = (
    WorkerGroup(
        name="train", kinds=frozenset({"trainer"}), devices=("cpu:0", "cpu:1"), on_host=True
    ),
    WorkerGroup(name="sample", kinds=frozenset({"engine"}), devices=("cpu:2",), on_host=True),
)
WHOLE = (
    WorkerGroup(
        name="cpu", kinds=frozenset({"trainer", "engine"}), awake=0, workers=0, most_ranks=4
    ),
)


def asked(
    run=None,
    session=None,
    *,
    model="tiny",
    groups=GROUPS,
    admin=False,
    settings=SETTINGS,
    training=FULL,
):
    return options_of(
        run,
        session,
        model=model,
        settings=settings,
        groups=groups,
        admin=admin,
        training=training,
    )


def test_who_asks_for_nothing_gets_the_defaults_of_the_platform():
    settings = GatewaySettings(
        trainer={"ranks": 2, "dtype": "bfloat16", "backend": "other"}, worker_start_timeout=7
    )
    options = asked({"purpose": "a test", "tandem_training": "full"}, settings=settings)
    assert (options.ranks, options.dtype, options.backend, options.start_timeout) == (
        2,
        "bfloat16",
        "other",
        7,
    )
    assert (options.group, options.sampler, options.memory, options.priority) == ("", True, 0, 0)


def test_a_run_counts_before_its_session_and_that_before_the_defaults_of_the_model():
    assert asked(model="large").ranks == 2
    assert asked(session={"tandem.ranks": "1"}, model="large").ranks == 1
    options = asked({"tandem.ranks": "2"}, {"tandem.ranks": "1", "tandem.dtype": "float32"})
    assert (options.ranks, options.dtype) == (2, "float32")


def test_every_name_is_understood_as_the_text_that_a_client_sends():
    options = asked(
        {
            "tandem.ranks": "2",
            "tandem.shards": "2",
            "tandem.tensor_parallel": "2",
            "tandem.dtype": "bfloat16",
            "tandem.states": "bfloat16",
            "tandem.offload": "moments",
            "tandem.compile": "on",
            "tandem.backend": "fsdp2",
            "tandem.share": "always",
            "tandem.group": "train",
            "tandem.sampler_group": "sample",
            "tandem.replicas": "3",
            "tandem.sampler_ranks": "1",
            "tandem.sampler": "none",
            "tandem.memory": "16GiB",
            "tandem.host_memory": "1024",
            "tandem.sampler_memory": "1GiB",
            "tandem.sampler_host_memory": "2GiB",
            "tandem.start_timeout": "600",
            "tandem.priority": "-3",
            "tandem.recovery": "off",
            "tandem.deadline": "3600",
            "tandem.keep_states": "2",
            "tandem.sharing": "time_slice",
        }
    )
    assert (options.deadline_at(10.0), options.keep_states) == (3610.0, 2)
    assert (options.memory, options.host_memory, options.sampler_host_memory) == (
        2**34,
        1024,
        2**31,
    )
    assert (options.sampler, options.priority, options.start_timeout) == (False, -3, 600.0)
    assert options.replicas == 3
    assert options.trainer_settings(SETTINGS).compile == "on"
    assert options.trainer_start_timeout == 1200.0, "with the time to compile"
    assert options.share == "always"
    assert options.sharing == Sharing.TIME_SLICE
    training = options.training(TrainingSpec())
    assert (training.states, training.offload) == ("bfloat16", "moments")
    assert training.layout == Layout(replicas=1, tensor_parallel=2)
    trainer = options.trainer_settings(GatewaySettings(trainer={"threads": 3}, operation_timeout=9))
    assert trainer.operation_timeout == 9
    assert (trainer.ranks, trainer.dtype, trainer.threads) == (2, "bfloat16", 3)
    assert trainer.memory_bytes == 2**34


def test_a_deadline_is_a_moment_or_seconds_from_the_creation():
    assert asked().deadline_at(10.0) is None
    for written in ("1970-01-01T01:00:00Z", "1970-01-01T02:00:00+01:00", "3590"):
        assert asked({"tandem.deadline": written}).deadline_at(10.0) == 3600.0


def test_a_trainer_may_use_the_memory_that_its_run_asks_for_or_else_that_of_the_settings():
    settings = GatewaySettings(trainer={"memory_bytes": 2**33})
    for metadata, expected in (({}, 2**33), ({"tandem.memory": "16G"}, 16 * 10**9)):
        options = asked(metadata)
        assert options.trainer_settings(settings).memory_bytes == expected


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("ranks", "0", "a whole number from 1 to 1024"),
        ("ranks", "two", "a whole number from 1 to 1024"),
        ("shards", "0", "a whole number from 1 to 1024"),
        ("dtype", "float64", "auto, float32 or bfloat16"),
        ("states", "float16", "float32 or bfloat16"),
        ("offload", "disk", "none, moments or weights"),
        ("sampler", "off", "none, for a run that only trains"),
        ("share", "yes", "when_full, always or never"),
        ("sharing", "alone", "exclusive, time_slice, mps"),
        ("sampler", "true", "none, for a run that only trains"),
        ("memory", "much", "a number of bytes"),
        ("memory", "-1", "a number of bytes"),
        ("memory", "2000000TiB", "a number of bytes"),
        ("start_timeout", "86400", "seconds, 3600 at most"),
        ("priority", "11", "a whole number from -10 to 10"),
        ("keep_states", "-1", "a whole number from 0 to 10000"),
        ("deadline", "0", "a number of seconds above 0"),
        ("deadline", "nan", "a number of seconds above 0"),
        ("deadline", "1e10", "a number of seconds above 0"),
        ("deadline", "tomorrow", "a number of seconds above 0"),
        ("deadline", "2026-12-24T18:00:00", "a number of seconds above 0"),
    ],
)
def test_a_wrong_value_is_refused_with_its_name_and_what_is_allowed(name, value, allowed):
    for run, session in (({f"tandem.{name}": value}, None), (None, {f"tandem.{name}": value})):
        with pytest.raises(InvalidRequest) as raised:
            asked(run, session)
        assert f"tandem.{name} is {value!r}; it is {allowed}" in raised.value.message


def test_an_unknown_name_is_refused_with_those_that_are_known():
    with pytest.raises(InvalidRequest, match=r"tandem\.gpus is unknown; known: .*tandem\.ranks"):
        asked({"tandem.gpus": "2"})


def test_a_priority_above_zero_is_for_administrators():
    assert asked({"tandem.priority": "5"}, admin=True).priority == 5
    with pytest.raises(PermissionDenied, match=r"tandem\.priority is 5"):
        asked({"tandem.priority": "5"})


def test_a_way_to_share_that_no_group_offers_is_refused_with_the_known_ones():
    with pytest.raises(
        InvalidRequest,
        match=r"tandem\.sharing is mps, which the groups train do not offer; known: exclusive, "
        r"time_slice\. An administrator declares another one \(`sharing` in TANDEM_GROUPS",
    ):
        asked({"tandem.sharing": "mps"})
    train, sample = GROUPS
    with pytest.raises(InvalidRequest, match="groups sample do not offer"):
        asked({"tandem.sharing": "mps"}, groups=(replace(train, sharing=Sharing.MPS), sample))
    by_mps = tuple(replace(group, sharing=Sharing.MPS) for group in GROUPS)
    assert asked({"tandem.sharing": "mps"}, groups=by_mps).sharing == Sharing.MPS
    with pytest.raises(InvalidRequest, match="known: exclusive, mps"):
        asked({"tandem.sharing": "time_slice"}, groups=by_mps)
    with pytest.raises(InvalidRequest, match=r"TANDEM_MODEL_DEFAULTS of m: tandem\.sharing is mps"):
        check_defaults(GatewaySettings(model_defaults={"m": {"sharing": "mps"}}), GROUPS)


def test_a_run_that_may_have_its_group_to_itself_shares_no_trainer_and_no_engine():
    for groups in (GROUPS, WHOLE):
        assert asked(groups=groups).share == "when_full"
        assert asked({"tandem.sharing": "time_slice"}, groups=groups).share == "when_full"
        for training in (FULL, None):
            exclusive = asked(None, {"tandem.sharing": "exclusive"}, training=training)
            assert exclusive.share == "never"
    declared = (*GROUPS, replace(GROUPS[0], name="x", sharing=Sharing.EXCLUSIVE))
    assert asked(groups=declared).share == "never"
    assert asked({"tandem.sharing": "time_slice"}, groups=declared).share == "when_full"


def test_an_exclusive_group_does_not_keep_runs_on_other_groups_apart():
    own, (train, sample) = Sharing.EXCLUSIVE, GROUPS
    declared = (*GROUPS, replace(train, name="x", sharing=own))
    always = {"tandem.share": "always", "tandem.group": "train"}
    assert asked(always, groups=declared).share == "always"
    assert asked(None, {"tandem.share": "always"}, groups=declared, training=None).share == "always"
    sampled = (*GROUPS, replace(sample, name="y", sharing=own))
    assert asked(always, groups=sampled).share == "never", "its engine may get y"
    for other in ({"tandem.sampler_group": "sample"}, {"tandem.sampler": "none"}):
        assert asked(always | other, groups=sampled).share == "always"
    alone = {"tandem.sampler": "none"}  # of a session that samples all the same
    assert asked(None, alone, groups=sampled, training=None).share == "never"


def test_more_ranks_than_any_group_has_devices_are_refused_with_the_groups():
    with pytest.raises(InvalidRequest, match=r"4 ranks .*there is: train \(2 devices\)"):
        asked({"tandem.ranks": "4"})
    assert asked({"tandem.ranks": "4"}, groups=WHOLE).ranks == 4
    with pytest.raises(InvalidRequest, match="whole machine, up to 4 ranks"):
        asked({"tandem.ranks": "5"}, groups=WHOLE)


def nodes(count: int, devices: int) -> WorkerGroup:
    return WorkerGroup(
        name=f"{count}x{devices}",
        kinds=frozenset({"trainer", "engine"}),
        devices=tuple(f"cuda:{n}" for n in range(devices)),
        nodes=count,
    )


def test_a_copy_of_the_model_is_on_the_ranks_of_one_node_unless_the_run_says_otherwise():
    def layout(run, *groups):
        return asked(run, groups=groups).training(TrainingSpec()).layout.replicas

    assert layout({"tandem.ranks": "8"}, nodes(2, 8)) == 1
    assert layout({"tandem.ranks": "16"}, nodes(2, 8)) == 2
    assert layout({"tandem.ranks": "16"}, nodes(2, 8), nodes(4, 4)) == 4, "it may be on either"
    assert layout({"tandem.ranks": "16", "tandem.group": "2x8"}, nodes(2, 8), nodes(4, 4)) == 2
    assert layout({"tandem.ranks": "16", "tandem.shards": "16"}, nodes(2, 8)) == 1
    assert layout({"tandem.ranks": "16", "tandem.backend": "other"}, nodes(2, 8)) == 1
    with pytest.raises(InvalidRequest, match=r"shards is 3, and 8 ranks .* one of 1, 2, 4, 8$"):
        layout({"tandem.ranks": "8", "tandem.shards": "3"}, nodes(2, 8))


def test_what_ranks_that_divide_matrices_cannot_do_is_refused_when_a_run_is_created():
    divided = {"tandem.ranks": "2", "tandem.tensor_parallel": "2"}
    assert settled(divided, None, TrainingSpec()).shards == 2
    with pytest.raises(InvalidRequest, match=r"tensor_parallel is 2, .*the 1 ranks .*shards\) are"):
        settled({**divided, "tandem.shards": "1"}, None, TrainingSpec())


def test_a_group_must_be_there_for_the_role():
    with pytest.raises(InvalidRequest, match=r"tandem.group is 'sample'.* known: train"):
        asked({"tandem.group": "sample"})
    with pytest.raises(InvalidRequest, match=r"tandem.sampler_group is 'none'.* known: sample"):
        asked({"tandem.sampler_group": "none"})


def test_a_wrong_default_of_a_model_is_a_fault_of_the_settings():
    check_defaults(SETTINGS, GROUPS)
    with pytest.raises(InvalidRequest, match=r"TANDEM_MODEL_DEFAULTS of m: tandem.ranks is '0'"):
        check_defaults(GatewaySettings(model_defaults={"m": {"ranks": 0}}), GROUPS)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (
            {"trainer": {"ranks": 4}},
            r"4 ranks \(TANDEM_TRAINER_RANKS, .*\) needs .*: train \(2 devices\)",
        ),
        (
            {"sampler": {"ranks": 3}},
            r"an engine on 3 devices \(TANDEM_SAMPLER_RANKS\) .*: sample \(1 device\)",
        ),
        ({"model_defaults": {"m": {"ranks": 3}}}, r"3 ranks \(TANDEM_MODEL_DEFAULTS of m: tandem"),
        (
            {"model_defaults": {"m": {"sampler_ranks": 2}}},
            r"engine on 2 devices \(TANDEM_MODEL_DEFAULTS of m: tandem.sampler_ranks\)",
        ),
    ],
)
def test_settings_that_no_group_has_devices_for_are_refused_with_both_numbers(settings, sentence):
    with pytest.raises(InvalidRequest, match=sentence):
        check_defaults(GatewaySettings(**settings), GROUPS)


KNOWN = tuple(replace(g, backends={"fsdp2": "", "own": "", "both": "is of two"}) for g in GROUPS)


@pytest.mark.parametrize("training", [FULL, None])
def test_an_unknown_backend_is_refused_with_those_that_are_known(training):
    for run, session in (({"tandem.backend": "x"}, None), (None, {"tandem.backend": "x"})):
        with pytest.raises(InvalidRequest, match=r"tandem\.backend is 'x', .*; known: fsdp2, own"):
            asked(run, session, model="", groups=KNOWN, training=training)
    assert asked({"tandem.backend": "own"}, groups=KNOWN).backend == "own"
    assert asked({"tandem.backend": "x"}, groups=GROUPS).backend == "x", "where nobody knows"


def test_a_backend_that_two_packages_register_is_refused_with_the_reason():
    with pytest.raises(InvalidRequest, match=r"tandem\.backend: is of two"):
        asked({"tandem.backend": "both"}, groups=KNOWN)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"trainer": {"backend": "x"}}, "TANDEM_TRAINER_BACKEND is 'x', .* known: fsdp2, own"),
        (
            {"model_defaults": {"m": {"backend": "x"}}},
            "TANDEM_MODEL_DEFAULTS of m: tandem.backend is 'x'",
        ),
    ],
)
def test_an_unknown_default_backend_is_a_fault_of_the_settings(settings, sentence):
    with pytest.raises(InvalidRequest, match=sentence):
        check_defaults(GatewaySettings(**settings), KNOWN)


SMALL_STATES = {"tandem.states": "bfloat16", "tandem.offload": "moments"}


def settled(run, session, training: TrainingSpec):
    return asked(run, session, training=training)


OTHERS = {"adapters": TrainingSpec(lora=LoraSpec()), "by dimuon": TrainingSpec(optimizer="dimuon")}


@pytest.mark.parametrize("kind", OTHERS)
def test_states_are_of_runs_that_train_all_parameters_by_adamw(kind):
    all_parameters = settled(None, SMALL_STATES, TrainingSpec())
    assert (all_parameters.states, all_parameters.offload) == ("bfloat16", "moments")
    other = settled(None, SMALL_STATES, OTHERS[kind])
    assert (other.states, other.offload) == ("float32", "none")
    settled({"tandem.states": "float32"}, None, OTHERS[kind])
    for name, value in SMALL_STATES.items():
        with pytest.raises(
            InvalidRequest, match=f"{name} is {value}, which is for .* trains {kind}"
        ):
            settled({name: value}, None, OTHERS[kind])


def test_frozen_weights_under_adapters_can_be_on_the_host_and_those_of_dimuon_cannot():
    asked = {"tandem.offload": "weights"}
    options = settled(asked, None, OTHERS["adapters"])
    training = options.training(OTHERS["adapters"])
    assert training.weights_on_host and not training.moments_on_host
    assert settled(None, asked, OTHERS["by dimuon"]).offload == "none"
    with pytest.raises(InvalidRequest, match=r"offload is weights, .* trains by dimuon"):
        settled(asked, None, OTHERS["by dimuon"])


def test_an_engine_on_more_devices_than_any_group_for_samplers_has_is_refused_with_the_groups():
    with pytest.raises(InvalidRequest, match=r"an engine on 2 devices .*there is: sample \(1 dev"):
        asked({"tandem.sampler_ranks": "2"})
    assert asked({"tandem.sampler_ranks": "2", "tandem.sampler": "none"}).sampler_ranks == 2
    assert asked({"tandem.sampler_ranks": "4"}, groups=WHOLE).sampler_ranks == 4
