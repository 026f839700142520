from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from tandem.custom_losses import MAX_BYTES, read_custom_loss
from tandem.custom_losses.graph import MAX_NODES
from tandem.errors import CustomLossInvalid, MalformedPayload

Body = dict[str, Any]


def node(op: str, name: str, target: str, *args: object, **kwargs: object) -> Body:
    return {"op": op, "name": name, "target": target, "args": list(args), "kwargs": kwargs}


def ref(name: str) -> dict[str, str]:
    return {"ref": name}


def output(loss: object, metrics: object = None) -> Body:
    returned = {"tuple": [loss, {"dict": metrics or {}}]}
    return node("output", "output", "output", returned)


def body_of(*nodes: Body, inputs: list[Body] | None = None) -> Body:
    """The negative sum of a graph, with `nodes` between placeholder and output."""
    last = nodes[-1]["name"] if nodes else "logprobs"
    return {
        "session_id": "s-test",
        "custom_loss_seq_id": 0,
        "name": "mine",
        "inputs": inputs or [{"name": "logprobs", "rank": 1}],
        "graph": {
            "format": 1,
            "nodes": [node("placeholder", "logprobs", "logprobs"), *nodes, output(ref(last))],
        },
    }


def read(body: Body) -> Any:
    return read_custom_loss(json.dumps(body).encode())


def refused(body: Body) -> str:
    with pytest.raises(CustomLossInvalid) as caught:
        read(body)
    return caught.value.message


SUM = node("call_method", "total", "sum", ref("logprobs"))


def test_a_plain_sum_is_read() -> None:
    graph = read(body_of(SUM))
    assert graph.name == "mine"
    assert [each.name for each in graph.nodes] == ["logprobs", "total"]
    assert graph.loss.node == 1


@pytest.mark.parametrize(
    "target",
    [
        "builtins.eval",
        "eval",
        "os.system",
        "torch.load",
        "torch.ops.aten.add",
        "torch.hub.load",
        "torch.utils.cpp_extension.load",
        "torch.rand_like",
        "torch.save",
        "torch.jit.script",
        "torch.compile",
        "math.factorial",
        "operator.methodcaller",
        "operator.attrgetter",
        "operator.setitem",
        "torch.__builtins__",
        "torch",
        "",
    ],
)
def test_a_function_outside_the_list_is_refused_by_name(target: str) -> None:
    message = refused(body_of(node("call_function", "x", target, ref("logprobs"))))
    assert "node 'x'" in message
    assert target in message


METHODS = """__class__ __reduce__ __getattribute__ __setitem__ __torch_function__ item tolist numpy
backward register_hook add_ exp_ requires_grad_ set_ share_memory_ apply_ map_ random_ storage
data_ptr cuda"""


@pytest.mark.parametrize("target", METHODS.split())
def test_a_method_outside_the_list_is_refused_by_name(target: str) -> None:
    message = refused(body_of(node("call_method", "x", target, ref("logprobs"))))
    assert target in message


@pytest.mark.parametrize("name", ["__class__", "grad", "data", "_backward_hooks", "is_cuda"])
def test_only_a_few_attributes_can_be_read(name: str) -> None:
    message = refused(body_of(node("call_function", "x", "getattr", ref("logprobs"), name)))
    assert "attributes allowed" in message


def test_an_attribute_cannot_be_named_by_a_node() -> None:
    body = body_of(node("call_function", "x", "getattr", ref("logprobs"), ref("logprobs")))
    assert "attributes allowed" in refused(body)


@pytest.mark.parametrize("op", ["call_module", "get_attr", "exec", "root"])
def test_modules_and_captured_tensors_are_refused(op: str) -> None:
    assert op in refused(body_of(node(op, "x", "weight"), SUM))


def test_a_node_can_name_earlier_nodes_alone_so_that_there_are_no_cycles() -> None:
    itself = node("call_function", "x", "torch.exp", ref("x"))
    later = node("call_function", "x", "torch.exp", ref("total"))
    assert "no earlier node" in refused(body_of(itself))
    assert "no earlier node" in refused(body_of(later, SUM))
    assert "no earlier node" in refused(body_of(node("call_method", "x", "sum", ref("nobody"))))


def test_names_are_unique() -> None:
    assert "same name" in refused(body_of(SUM, SUM))


def test_placeholders_must_be_the_inputs_in_order() -> None:
    both = [{"name": "logprobs", "rank": 1}, {"name": "weights", "rank": 1}]
    assert "placeholder" in refused(body_of(SUM, inputs=both))
    body = body_of(node("placeholder", "old", "old"), SUM)
    assert "placeholder" in refused(body)
    late = body_of(SUM, node("placeholder", "weights", "weights"), SUM, inputs=both)
    assert "placeholder" in refused(late)
    default = body_of(SUM)
    default["graph"]["nodes"][0]["args"] = [1.0]
    assert "placeholder" in refused(default)


def test_the_first_input_is_logprobs() -> None:
    for inputs in ([{"name": "weights", "rank": 1}], [{"name": "logprobs", "rank": 0}]):
        assert "logprobs" in refused(body_of(SUM, inputs=inputs))


@pytest.mark.parametrize("key", ["out", "generator", "requires_grad", "pin_memory", "a b"])
def test_keywords_that_write_or_draw_are_refused(key: str) -> None:
    x = node("call_function", "x", "torch.exp", ref("logprobs"))
    x["kwargs"] = {key: ref("logprobs")}
    assert key in refused(body_of(x))


def test_in_place_is_refused() -> None:
    x = node("call_function", "x", "torch.nn.functional.relu", ref("logprobs"), inplace=True)
    assert "in place" in refused(body_of(x))
    method = node("call_method", "x", "clamp_", ref("logprobs"))
    assert "without the underscore" in refused(body_of(method))


@pytest.mark.parametrize(
    "argument",
    [
        {"ref": 1},
        {"ref": "logprobs", "tuple": []},
        {"code": "import os"},
        {"dtype": "complex64"},
        {"float": "1e999"},
        {"slice": [1, 2]},
        {"ellipsis": False},
        {"device": 3},
        {},
        2**63,
        "x" * 65,
        [0] * 300,
    ],
)
def test_arguments_of_unknown_forms_are_refused(argument: object) -> None:
    refused(body_of(node("call_function", "x", "torch.exp", argument)))


def test_nesting_is_bounded() -> None:
    deep: object = ref("logprobs")
    for _ in range(20):
        deep = [deep]
    assert "deep" in refused(body_of(node("call_function", "x", "torch.stack", deep)))
    text = json.dumps(body_of(SUM)).replace('{"ref": "logprobs"}', "[" * 5000 + "]" * 5000)
    with pytest.raises((MalformedPayload, CustomLossInvalid)):
        read_custom_loss(text.encode())


def test_the_number_of_nodes_and_bytes_is_bounded() -> None:
    many = [
        node("call_method", f"n{i}", "sum", ref("logprobs" if i == 0 else f"n{i - 1}"))
        for i in range(MAX_NODES)
    ]
    assert "nodes" in refused(body_of(*many))
    with pytest.raises(CustomLossInvalid, match="bytes"):
        read_custom_loss(b" " * (MAX_BYTES + 1))


@pytest.mark.parametrize(
    "returned",
    [
        [],
        [ref("total")],
        [1.0, {"dict": {}}],
        [ref("total"), ref("total")],
        [ref("total"), {"dict": {"loss:sum": ref("total")}}],
        [ref("total"), {"dict": {"custom/x:max": ref("total")}}],
        [ref("total"), {"dict": {"custom/x:sum:sum": ref("total")}}],
        [ref("total"), {"dict": {"custom/x:sum": 1.0}}],
    ],
)
def test_a_loss_and_well_named_metrics_must_be_returned(returned: list[object]) -> None:
    body = body_of(SUM)
    body["graph"]["nodes"][-1]["args"] = [{"tuple": returned}]
    refused(body)


def test_the_output_comes_last_and_once() -> None:
    body = body_of(SUM)
    body["graph"]["nodes"].append(body["graph"]["nodes"][-1])
    assert "output" in refused(body)
    body["graph"]["nodes"] = body["graph"]["nodes"][:-2]
    assert "output" in refused(body)


def without(key: str) -> Callable[[Body], None]:
    def change(body: Body) -> None:
        del body[key]

    return change


@pytest.mark.parametrize("key", ["name", "inputs", "graph"])
def test_missing_fields_are_a_malformed_payload(key: str) -> None:
    body = body_of(SUM)
    without(key)(body)
    with pytest.raises(MalformedPayload, match=key):
        read(body)


def test_another_format_of_graphs_is_refused() -> None:
    body = body_of(SUM)
    body["graph"]["format"] = 2
    with pytest.raises(MalformedPayload, match="format"):
        read(body)


def test_what_is_no_json_is_refused() -> None:
    with pytest.raises(MalformedPayload):
        read_custom_loss(b"\x80\x04.")
