"""Whether results are right, for any operator: by its declaration and the acceptance rule, against the reference in float64."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tests.inputs import floating
from torch import Tensor

from kdk.op import Op
from kdk.rounding import storing
from kdk_bench.discrete import Dequantised, judge_choice
from kdk_bench.expectation import forward_results, wider
from kdk_bench.numerics import judge

LONGEST = 4096  # no sum here has more terms


class Right:
    """What a forward must give and, for given gradients of its floating-point outputs, its backward.

    Of a discrete choice `got` is judged by itself; everything else must be what belongs to it.
    """

    def __init__(self, op: Op, arguments: Mapping[str, Any], got: Sequence[Tensor]) -> None:
        self.op, self.got = op, [t.detach() for t in got]
        args = tuple([a.detach().clone() if isinstance(a := arguments[n], Tensor) else a for n in op.arguments])
        self.args, self.wide = args, wider(op, args, torch.float64)
        self.leaves = {n: a.requires_grad_() for n, a in zip(op.arguments, self.wide) if n in op.uses and a is not None}
        self.reference = self._outputs(args, None)
        names = op.choice.outputs if op.choice else ()
        self.chosen = {n: t for n, t in zip(op.outputs, self.got) if n in names} or None
        self.dtype = next(a.dtype for a in args if isinstance(a, Tensor) and a.is_floating_point())
        with storing(self.dtype):
            self.oracle = self._outputs(self.wide, self.chosen)

    def _outputs(self, args: tuple[Any, ...], chosen: Mapping[str, Tensor] | None) -> dict[str, Tensor]:
        return dict(zip(self.op.outputs, forward_results(self.op, args, chosen)))  # type: ignore[arg-type]

    def check(self) -> None:
        """Every output is right."""
        assert len(self.got) == len(self.op.outputs)
        if self.op.choice is not None and self.chosen is not None:
            arguments = {n: a.detach() if isinstance(a, Tensor) else a for n, a in zip(self.op.arguments, self.wide)}
            reason = judge_choice(self.op.choice, arguments, self.chosen, self.reference, LONGEST)
            assert not reason, reason
        for name, got in zip(self.op.outputs, self.got):
            if name in self.op.quantised:
                self._check_quantised(name, got)
            elif name not in (self.chosen or ()):
                agree(got, self.oracle[name], self.reference[name].dtype)

    def _check_quantised(self, name: str, got: Tensor) -> None:
        how = self.op.quantised[name]
        with storing(self.dtype):
            values, near = (how.of(dict(zip(self.op.arguments, args))) for args in (self.wide, wider(self.op, self.args, torch.float32)))
        right = Dequantised(values, near, None, self.oracle[name], self.oracle[how.scale], LONGEST)
        verdict, _ = right.judge(got, self.got[self.op.outputs.index(how.scale)])
        assert verdict.accepted, f"{name}: {verdict.reason}"

    def gradients(self, grads: Sequence[Tensor]) -> dict[str, Tensor]:
        """Of the differentiable inputs, in float64."""
        outputs = floating(list(self.oracle.values()))
        found = torch.autograd.grad(outputs, list(self.leaves.values()), [g.double() for g in grads])
        return dict(zip(self.leaves, found))


def agree(got: Tensor, oracle: Tensor, dtype: torch.dtype) -> None:
    """The yardstick is the oracle itself, rounded to the dtype that the result must have."""
    oracle = oracle.detach()
    verdict = judge(got.detach(), oracle.to(dtype), oracle, longest=LONGEST)
    assert verdict.accepted, verdict.reason
