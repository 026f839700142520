from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.errors import InvalidRequest
from tandem.protocol.devices import Device, parse_device, together


@pytest.mark.parametrize(
    ("text", "cores"),
    [("cpu:0", {0}), ("cpu:0-3", {0, 1, 2, 3}), ("cpu:0,2", {0, 2}), (" cpu:1-2, 5 ", {1, 2, 5})],
)
def test_cores_are_read(text, cores):
    assert parse_device(text) == Device("cpu", cores=frozenset(cores))


@pytest.mark.parametrize("name", ["0", "7", "GPU-8f6a2c1e-0000-11aa", "GPU-8f"])
def test_an_nvidia_device_is_an_index_or_a_uuid(name):
    assert parse_device(f"cuda:{name}") == Device("cuda", cuda=name)


@pytest.mark.parametrize("name", ["MIG-5c6e/1/0", "MIG-GPU-8f6a/1/0", "MIG-8f6a2c1e-0000"])
def test_a_mig_instance_is_refused_by_name_with_what_to_do(name):
    with pytest.raises(InvalidRequest, match=f"cuda:{name} is a MIG instance: .* turn MIG off"):
        parse_device(f"cuda:{name}")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "cpu",
        "cpu:",
        "cpu:x",
        "cpu:3-1",
        "cpu:0,",
        "cpu:-1",
        "cuda",
        "cuda:",
        "cuda:0,1",
        "cuda:gpu",
        "rocm:0",
        "0-3",
    ],
)
def test_another_name_is_refused_with_an_example_of_a_right_one(text):
    with pytest.raises(InvalidRequest, match=r"is not a device; write cores like 'cpu:0-3'"):
        parse_device(text)


@given(st.frozensets(st.integers(0, 300), min_size=1))
def test_a_device_is_read_as_it_is_printed(cores):
    device = Device("cpu", cores=cores)
    assert parse_device(str(device)) == device


def test_a_process_that_uses_several_devices_sees_all_of_them():
    devices = [parse_device(name) for name in ("cpu:0-1", "cpu:4")]
    assert str(together(devices)) == "cpu:0-1,4"
    devices = [parse_device(name) for name in ("cuda:1", "cuda:GPU-8f6a")]
    assert together(devices).cuda == "1,GPU-8f6a"
