"""The main job: `python -m kdk_bench.llama` runs a patched Llama, forward and backward, against float64.

A Llama of real width, two layers, random weights: unpatched, patched on kdk's references and patched on the platform's own
choice, in float32 and bfloat16. Then a narrow twin with the kernels of each language in their simulators. Exit code 1 when a
patched model is less accurate than it may be, or when an operator did not run.

What is compared: the logits and the gradient of every parameter, each with that of the same model in float64 on kdk's
references, whose weights were rounded to the dtype first. The error of the unpatched model of the same dtype is the measure:

* relative RMS error (RMS of the difference over RMS of the float64 tensor) and worst error (largest difference over the
  largest float64 value), each at most FACTOR times the unpatched model's for the same tensor;
* or at most the floor of `kdk_bench.numerics.floors` for one rounding, a few units in the last place: a tensor in which the
  unpatched model's roundings happen to cancel is no fair measure. No parameter here has fewer than 256 elements, so the
  worst of them is not the luck of one; nothing is allowed beyond the floor;
* a wrong reference would make the float64 model wrong, and the measure with it. So the unpatched model in float64 is compared
  with it first. Its norms sum `hidden` squares in float32; it may differ by the floor for such a sum and no more.
"""

from __future__ import annotations

import contextlib
import copy
import math
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import Tensor, nn

import kdk
import kdk.ops
from kdk_bench.numerics import floors

FACTOR = 2
OPERATORS = ("rms_norm", "rope", "silu_and_mul")
LOGITS = "logits"


@dataclass(frozen=True)
class Size:
    """A Llama: sizes as in its configuration, and the length of the one sequence that runs through it."""

    name: str
    hidden: int
    heads: int
    kv_heads: int
    mlp: int
    vocabulary: int
    tokens: int
    layers: int = 2


REAL = Size("real width", hidden=2048, heads=32, kv_heads=8, mlp=8192, vocabulary=4096, tokens=64)
TWIN = Size("narrow twin", hidden=256, heads=8, kv_heads=2, mlp=512, vocabulary=512, tokens=16)
DTYPES = (torch.float32, torch.bfloat16)


class Error(NamedTuple):
    rms: float
    worst: float


@dataclass(frozen=True)
class Run:
    """One forward and backward: the loss, and by name the logits and every gradient."""

    loss: float
    tensors: Mapping[str, Tensor]


@dataclass(frozen=True)
class Oracle:
    """The float64 run that the others are compared with, and the RMS and the largest value of each of its tensors."""

    run: Run
    scales: Mapping[str, Error]


@dataclass
class Row:
    """A line of the table. errors: by tensor. ran: what ran how often. failures: what does not hold."""

    size: str
    dtype: str
    how: str
    loss: float
    errors: Mapping[str, Error]
    ran: Sequence[str] = ()
    failures: list[str] = field(default_factory=list)
    ratio: float | None = None


def build(size: Size) -> nn.Module:
    """The model with random weights, always the same ones, in float32. Norm weights too differ from 1."""
    import transformers

    config = transformers.LlamaConfig(
        hidden_size=size.hidden,
        intermediate_size=size.mlp,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        vocab_size=size.vocabulary,
        rms_norm_eps=1e-5,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(config)
        with torch.no_grad():
            for p in model.parameters():
                if p.dim() == 1:
                    p += 0.1 * torch.randn_like(p)
    return model


def cast(model: nn.Module, rounded_to: torch.dtype, dtype: torch.dtype) -> nn.Module:
    """A copy with the weights rounded to one dtype and held in another.

    The rotary frequencies stay in float32, as transformers keeps them when it loads a model in 16 bits.
    """
    model = copy.deepcopy(model)
    for p in model.parameters():
        p.data = p.data.to(rounded_to).to(dtype)
    return model


def tokens(size: Size) -> Tensor:
    return torch.randint(size.vocabulary, (1, size.tokens), generator=torch.Generator().manual_seed(1))


def run(model: nn.Module, ids: Tensor) -> Run:
    """The labels are the tokens. transformers' own loss computes in float32 always, so it is not used for float64."""
    model.zero_grad(set_to_none=True)
    logits = model(input_ids=ids, use_cache=False).logits
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    loss = F.cross_entropy(wide[0, :-1], ids[0, 1:])
    loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return Run(loss.item(), {LOGITS: logits.detach(), **grads})


def scale(t: Tensor) -> Error:
    """RMS and largest absolute value."""
    return Error(torch.linalg.vector_norm(t).item() / t.numel() ** 0.5, torch.linalg.vector_norm(t, float("inf")).item())


def errors(got: Run, oracle: Oracle) -> dict[str, Error]:
    """Relative to the RMS and to the largest value of the oracle's tensor; infinite where a value is not finite."""
    if got.tensors.keys() != oracle.run.tensors.keys():
        raise AssertionError(f"not the same gradients: {got.tensors.keys() ^ oracle.run.tensors.keys()}")
    found = {}
    for name, of in oracle.scales.items():
        difference = scale(got.tensors[name].double().sub_(oracle.run.tensors[name]))
        found[name] = Error(*(d / s if math.isfinite(d) else math.inf for d, s in zip(difference, of)))
    return found


def floor(dtype: torch.dtype, oracle: Oracle, longest: int = 1) -> dict[str, Error]:
    """The errors that are always allowed, as `errors` measures them."""
    allowed = floors(dtype, longest)
    return {
        name: Error(max(allowed.rms_of_rms, allowed.rms_of_peak * of.worst / of.rms), allowed.worst)
        for name, of in oracle.scales.items()
    }


def judge(row: Row, measure: Mapping[str, Error], floor_of: Mapping[str, Error], whose: str) -> None:
    """Note in the row every tensor whose error is past its limit, and the largest share of a limit."""
    row.ratio = 0.0
    for name, mine in row.errors.items():
        for kind, got, usual, least in zip(("relative RMS", "worst"), mine, measure[name], floor_of[name]):
            limit = max(FACTOR * usual, least)
            row.ratio = max(row.ratio, got / limit)
            if got > limit:
                what = name if name == LOGITS else f"gradient of {name}"
                row.failures.append(
                    f"{what}: {kind} error {got:.2e} is {got / limit:.3g} times its limit {limit:.2e} ({whose}: {usual:.2e})"
                )


def describe(ran: kdk.record) -> list[str]:
    """What ran: per implementation the forward + backward calls of each operator. Then the refusals."""
    calls: dict[str, dict[str, list[int]]] = {}
    refusals = []
    for r in ran.rows:
        if r.how == "refused":
            refusals.append(f"{r.op}.{r.direction} x{r.calls} refused by {r.implementation}: {r.reason}")
        else:
            both = calls.setdefault(f"{r.implementation} {r.how}", {}).setdefault(r.op, [0, 0])
            both[r.direction != "forward"] += r.calls
    lines = [f"{how}: " + ", ".join(f"{op} {f}+{b}" for op, (f, b) in of.items()) for how, of in calls.items()]
    return [*lines, *refusals]


def missing_calls(ran: kdk.record, inlined: bool) -> list[str]:
    """Operators that did not run. Inlined references are plain torch: their backward is torch's own."""
    directions = ("forward",) if inlined else ("forward", "backward")
    return [f"{op}.{d} did not run" for op in OPERATORS for d in directions if not ran.calls(op, d)]


def kernels_ran(ran: kdk.record, target: str) -> list[str]:
    """Under `simulate`: a kernel that neither ran as its target nor was refused with a reason."""
    seen = {(r.op, r.direction) for r in ran.rows if r.how in ("simulated", "refused") and r.target == target}
    return [f"{op}.{d}: no kernel of {target} ran" for op in OPERATORS for d in ("forward", "backward") if (op, d) not in seen]


def compare(size: Size, dtype: torch.dtype, hows: Mapping[str, Any], master: nn.Module) -> Iterator[Row]:
    """The rows of one size and dtype: unpatched, then patched in every way of `hows`, name -> context."""
    ids, short = tokens(size), str(dtype).removeprefix("torch.")
    wide = cast(master, dtype, torch.float64)
    plain = run(wide, ids) if dtype == torch.float32 else None
    oracle = reference(wide, ids)
    del wide
    if plain is not None:
        row = Row(size.name, "float64", "unpatched", plain.loss, errors(plain, oracle))
        nothing = dict.fromkeys(row.errors, Error(0.0, 0.0))
        judge(row, nothing, floor(torch.float32, oracle, size.hidden), "a right reference differs by float32's rounding only")
        yield row

    model = cast(master, dtype, dtype)
    result = run(model, ids)
    measure = errors(result, oracle)
    yield Row(size.name, short, "unpatched", result.loss, measure)
    kdk.patch(model)
    for how, context in hows.items():
        with kdk.record() as ran, context:
            result = run(model, ids)
        row = Row(size.name, short, how, result.loss, errors(result, oracle), describe(ran))
        row.failures += missing_calls(ran, inlined=how == PLAIN)
        if how in TARGETS:
            row.failures += kernels_ran(ran, how)
        judge(row, measure, floor(dtype, oracle), "unpatched")
        yield row


def reference(model: nn.Module, ids: Tensor) -> Oracle:
    """The run of a model that is patched, and stays so, on kdk's references."""
    kdk.patch(model)
    with kdk.use("reference"):
        result = run(model, ids)
    return Oracle(result, {name: scale(t) for name, t in result.tensors.items()})


PLAIN = "reference, plain torch"
DEFAULT = "default choice"
TARGETS = ("sm_90", "v6e", "trn2")


def job(real: Size, twin: Size, targets: Sequence[str]) -> Iterator[Row]:
    """All rows: the real width on the references, its twin in the simulators."""
    for size, hows in (
        (real, lambda: {PLAIN: kdk.use("reference"), DEFAULT: contextlib.nullcontext()}),
        (twin, lambda: {PLAIN: kdk.use("reference"), **{target: kdk.simulate(target) for target in targets}}),
    ):
        master = build(size)
        for dtype in DTYPES:
            yield from compare(size, dtype, hows(), master)


def _worst(row: Row, kind: int) -> str:
    """The largest error of a kind over all parameters' gradients, and whose it is."""
    name, value = max(((n, e[kind]) for n, e in row.errors.items() if n != LOGITS), key=lambda item: item[1])
    return f"{value:.1e} {name.removeprefix('model.').removesuffix('.weight')}"


HEADINGS = (
    "model",
    "how",
    "loss",
    "logits\nrel. RMS, worst",
    "gradients, largest\nrel. RMS and worst",
    "share of\nlimit",
    "ran (calls forward + backward)",
)


def table(rows: Sequence[Row]) -> Table:
    result = Table(title="Llama, forward and backward: errors against float64", title_justify="left", show_lines=True)
    for heading in HEADINGS:
        result.add_column(heading, overflow="fold")
    for row in rows:
        share = "" if row.ratio is None else f"[{'red' if row.failures else 'green'}]{row.ratio:.2f}[/]"
        logits = row.errors[LOGITS]
        result.add_row(
            f"{row.size}\n{row.dtype}",
            row.how,
            f"{row.loss:.5f}",
            f"{logits.rms:.1e}\n{logits.worst:.1e}",
            f"{_worst(row, 0)}\n{_worst(row, 1)}",
            share,
            escape("\n".join(row.ran)),
        )
    return result


def main() -> int:
    """Run the job, print the table and what does not hold; 0 or 1."""
    console = Console(width=None if sys.stdout.isatty() else 150)
    start = time.perf_counter()
    console.print(f"Llama of {REAL.name}: {REAL.layers} layers, hidden {REAL.hidden}, {REAL.tokens} tokens; patching:")
    console.print(escape(str(kdk.patch(build(TWIN)))), highlight=False)
    rows = []
    with console.status("running") as status, warnings.catch_warnings():  # the status: on a terminal only
        warnings.simplefilter("ignore", kdk.FallbackWarning)  # the table shows every refusal
        for row in job(REAL, TWIN, TARGETS):
            rows.append(row)
            status.update(f"done: {row.size}, {row.dtype}, {row.how}")
    console.print(table(rows))
    failed = [(row, failure) for row in rows for failure in row.failures]
    for row, failure in failed:
        console.print(f"[red]failed[/] {row.size}, {row.dtype}, {row.how}: {escape(failure)}", highlight=False)
    console.print(
        f"{len(failed)} failures in {time.perf_counter() - start:.0f} s. Limit: {FACTOR} times the unpatched model's error."
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
