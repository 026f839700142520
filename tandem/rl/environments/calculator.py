"""An example of an environment: products that the policy computes with a calculator."""

from __future__ import annotations

import ast
import operator
import random
import re
from collections.abc import Callable

from tandem.rl.environments.tools import ToolEnvironment
from tandem.rl.rollouts import Example

_OPERATORS: dict[type[ast.AST], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
}


def calculate(expression: str) -> int:
    """Compute an expression of whole numbers with +, - and *, for example (3 + 4) * 12."""
    if len(expression) > 200:
        raise ValueError("the expression has more than 200 characters")
    return _value(ast.parse(expression, mode="eval").body)


def _value(node: ast.AST) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_value(node.left), _value(node.right))
    raise ValueError("only whole numbers, +, - and * are known")


def products(count: int, *, digits: int = 4, seed: int = 0) -> list[Example]:
    """Return questions for the product of two numbers."""
    rng = random.Random(seed)
    low, high = 10 ** (digits - 1), 10**digits - 1
    examples = []
    for _ in range(count):
        left, right = rng.randint(low, high), rng.randint(low, high)
        question = f"What is {left} * {right}? Use the calculator. Answer with the number alone."
        examples.append(Example([{"role": "user", "content": question}], {"answer": left * right}))
    return examples


class CalculatorEnvironment(ToolEnvironment):
    """The reward is 1 for the right number after a call of the calculator, else 0."""

    def __init__(self) -> None:
        super().__init__([calculate], max_turns=4)

    async def score(self, example: Example, answer: str) -> float:
        numbers = re.findall(r"-?\d+", answer.replace(",", ""))
        right = bool(numbers) and numbers[-1] == str(example.data["answer"])
        return float(right and self.calls.get("calculate", 0) > 0)
