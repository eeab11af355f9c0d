"""Ways to a capture: a factory, an exported program. (A script: scripts.py; a configuration: configurations.py.)"""

from __future__ import annotations

import contextlib
import copy
import importlib
import inspect
import io
import logging
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map

from kdk.errors import KdkError, UsageError
from kdk_bench.audit import counting
from kdk_bench.audit.places import TORCH, short
from kdk_bench.audit.recorder import Session
from kdk_bench.audit.redirecting import Redirect
from kdk_bench.audit.trace import Capture

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass
class Workload:
    """A model and one set of inputs. loss: from the model's output; without it the output's own loss, or the sum of its tensors."""

    model: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    loss: Callable[[Any], Tensor] | None = None


def from_factory(text: str) -> tuple[Callable[[], Any], list[str]]:
    """The function of "pkg.module:factory", and the files of its package that are its author's."""
    module, _, name = text.partition(":")
    if "" not in sys.path:
        sys.path.insert(0, "")
    limit = "pkg.module:factory, a .pt2 file, --script FILE or --hf CONFIG"
    if module.endswith(".py"):
        way_out = f"{module.removesuffix('.py').replace('/', '.')}:{name or 'factory'}, or --script {module}"
        raise UsageError("AUDIT-MODEL", "a file where a module's name belongs", value=text, limit=limit, way_out=way_out)
    try:
        loaded = importlib.import_module(module)
    except (Exception, SystemExit) as error:  # somebody's module may raise anything
        way_out = "run from the folder it lies in"
        if not module or (isinstance(error, ModuleNotFoundError) and module.startswith(error.name or "?")):
            raise UsageError("AUDIT-MODEL", "no such module", value=module or text, limit=limit, way_out=way_out) from None
        way_out = f"python -c 'import {module}' shows where"
        raise UsageError("AUDIT-MODEL", f"{module} could not be imported", value=said(error), limit=limit, way_out=way_out) from None
    factory = getattr(loaded, name, None) if name else None
    if not callable(factory):
        way_out = f"{module}:NAME of a function that returns (module, args, kwargs) or yields several"
        raise UsageError("AUDIT-MODEL", f"{module} has no such function", value=repr(name), way_out=way_out)
    return factory, [inspect.getsourcefile(loaded) or ""]


FORWARD = "leave --train out: forward only"
LONGEST = 300  # characters of somebody's message: libraries list all that they know


def said(error: BaseException) -> str:
    """An error in a line: its type, its first line, and where it was raised, outside torch if it came from there."""
    hidden = (str(Path(__file__).parent), "<")
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(hidden)]
    frames = [f for f in frames if not f.filename.startswith(TORCH)] or frames
    text = next(iter(str(error).strip().splitlines()), "")
    text = text if len(text) <= LONGEST else f"{text[:LONGEST]} ..."
    return f"{type(error).__name__}: {text}" + (f" ({short(frames[-1].filename)}:{frames[-1].lineno})" if frames else "")


def workloads(made: Any) -> Iterator[Workload]:
    """One per set of inputs that the factory returned or yields."""
    many = inspect.isgenerator(made) or isinstance(made, list)
    for item in made if many else (made,):
        if isinstance(item, nn.Module) or not isinstance(item, tuple) or len(item) not in (2, 3, 4) or not isinstance(item[0], nn.Module):
            limit = "(module, args, kwargs) or (module, args, kwargs, loss)"
            raise UsageError("AUDIT-FACTORY", "what the factory returned", value=type(item).__name__, limit=limit)
        model, args, *rest = item
        kinds = [type(part).__name__ for part in item]
        if not isinstance(args, tuple | list) or (rest and not isinstance(rest[0], Mapping)) or (len(rest) > 1 and not callable(rest[1])):
            limit = "(module, a tuple of args, a dictionary of kwargs, a function of the output)"
            raise UsageError("AUDIT-FACTORY", "what the factory returned", value=f"({', '.join(kinds)})", limit=limit)
        yield Workload(model, tuple(args), dict(rest[0]) if rest else {}, rest[1] if len(rest) > 1 else None)


def cast(work: Workload, dtype: str) -> Workload:
    """The workload in another floating-point dtype."""
    wanted = DTYPES[dtype]

    def convert(value: Any) -> Any:
        return value.to(wanted) if isinstance(value, Tensor) and value.is_floating_point() else value

    return Workload(work.model.to(wanted), tree_map(convert, work.args), tree_map(convert, work.kwargs), work.loss)


def total(output: Any) -> Tensor:
    """A loss for any output: its own, or the sum of its floating-point tensors."""
    own = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    if isinstance(own, Tensor):
        return own
    tensors = [t for t in tree_flatten(_plain(output))[0] if isinstance(t, Tensor) and t.requires_grad and not t.is_complex()]
    if not tensors:
        way_out = f"return a loss as the factory's fourth value, or {FORWARD}"
        raise UsageError("AUDIT-LOSS", "no output of the model has a gradient", value=type(output).__name__, way_out=way_out)
    result = tensors[0].sum()
    for tensor in tensors[1:]:
        result = result + tensor.sum()
    return result


def _plain(output: Any) -> Any:
    """Outputs of libraries are dictionaries or objects with tensors."""
    if isinstance(output, Tensor | tuple | list | dict) and not hasattr(output, "to_tuple"):
        return output
    if hasattr(output, "to_tuple"):
        return output.to_tuple()
    return list(vars(output).values()) if hasattr(output, "__dict__") else output


def run(factory: Callable[[], Any], train: bool, dtype: str = "") -> Session:
    """Every workload twice: once with its tensors kept, once for times and memory."""
    session = Session("eager run")
    session.capture.forward_only = not train
    redirect = Redirect(session)
    work = None
    with redirect.active():
        for work in workloads(_making(factory, session)):
            work = cast(work, dtype) if dtype else work
            if not attempt(session, lambda work=work: _run(session, work, train)):  # type: ignore[misc]
                break
        if work is None:
            limit = "one (module, args, kwargs) at least"
            raise UsageError("AUDIT-FACTORY", "the factory gave nothing", value="0 inputs", limit=limit, way_out="return or yield one")
        if not session.capture.error and not any(step.calls for step in session.capture.steps):
            session.capture.error = "the model called no operator"
        if not session.capture.error:
            events = copy.deepcopy(session.capture.events)
            with session.functions:  # its requests for cuda go to the CPU here too
                session.capture.graph_breaks = graph_break(work, session.capture)
            session.capture.events = events  # what tracing asks for is no part of the run
    return session


LARGEST = 2000  # operator calls: tracing more takes longer than the audit


def graph_break(work: Workload, capture: Capture) -> str:
    """Why torch.export cannot take the model as one graph, or "". It says nothing else: the eager run is what is audited."""
    if len(capture.steps[0].calls) > LARGEST:
        capture.notes.append("torch.export was not asked for graph breaks: the model is too large for that")
        return ""
    try:
        with torch.no_grad(), _quiet():
            torch.export.export(work.model, work.args, work.kwargs, strict=False)
    except Exception as error:  # whatever tracing somebody's program raises is the answer
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        return f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]
    return ""


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """torch.export logs and prints a page about every failure."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.disable(before)


def attempt(session: Session, function: Callable[[], Any]) -> bool:
    """Run somebody else's program; where it ends early, what was seen until then is still reported."""
    try:
        function()
    except KdkError:
        raise
    except (Exception, SystemExit) as error:
        session.capture.error = said(error)
        session.end()
        return False
    return True


def _making(factory: Callable[[], Any], session: Session) -> Any:
    """The factory runs under the redirection too, and is not recorded."""
    made = factory_under(factory, session)
    if inspect.isgenerator(made):
        return _each(made, session)
    return made


def factory_under(factory: Callable[[], Any], session: Session) -> Any:
    with session.functions, _somebodys_factory():
        return factory()


def _each(made: Iterator[Any], session: Session) -> Iterator[Any]:
    while True:
        with session.functions, _somebodys_factory():
            try:
                item = next(made)
            except StopIteration:
                return
        yield item


@contextlib.contextmanager
def _somebodys_factory() -> Iterator[None]:
    try:
        yield
    except KdkError:
        raise
    except (Exception, SystemExit) as error:
        limit = "a function that is called without arguments"
        way_out = "call it by itself: it fails without kdk too"
        raise UsageError("AUDIT-FACTORY", "the factory raised", value=said(error), limit=limit, way_out=way_out) from None


def _run(session: Session, work: Workload, train: bool) -> None:
    model = work.model.train(train)
    parameters = list(model.parameters())
    trained = [p for p in parameters if p.requires_grad]
    optimiser = torch.optim.AdamW(trained, lr=1e-6) if train and trained else None
    if not session.places.roots or session.places.roots[-1] is not model:
        session.places.name(model)
    first = not session.capture.steps
    session.capture.memory["parameters"] = counting.moved([*parameters, *model.buffers()])
    with session.running():
        for keep in (True, False) if first else (False,):
            session.begin((work.args, work.kwargs), keep, parameters)
            if train:
                output = model(*work.args, **work.kwargs)
                loss = (work.loss or total)(output)
                if not isinstance(loss, Tensor) or not loss.requires_grad:
                    got = type(loss).__name__ + " without a gradient" * isinstance(loss, Tensor)
                    way_out = f"a loss computed from the model's output without detach(), or {FORWARD}"
                    raise UsageError("AUDIT-LOSS", "what the loss returned", value=got, limit="a tensor with a gradient", way_out=way_out)
                loss.backward()  # type: ignore[no-untyped-call]
                if optimiser is not None:
                    optimiser.step()
                    gradients = [p.grad for p in parameters if p.grad is not None]
                    session.capture.memory["gradients"] = counting.moved(gradients)
                    optimiser.zero_grad()
            else:
                with torch.no_grad():
                    model(*work.args, **work.kwargs)
            session.end()


def run_exported(path: str, dtype: str = "") -> Session:
    """A program saved by torch.export.save: forward only, on random inputs of its example's shapes."""
    try:
        with _quiet():
            program = torch.export.load(path)
    except Exception as error:  # a file may be anything
        limit, way_out = "a file of torch.export.save", "torch.export.save(torch.export.export(model, args), FILE)"
        problem = f"{path} could not be read by torch.export.load"
        raise UsageError("AUDIT-PT2", problem, value=said(error), limit=limit, way_out=way_out) from None
    if program.example_inputs is None:
        way_out = "torch.export.export(model, args) keeps them; save it again"
        raise UsageError("AUDIT-PT2", f"{path} has no example inputs", way_out=way_out)
    args, kwargs = program.example_inputs
    model: nn.Module = program.module()
    # An exported module refuses train() and eval().
    model.train = lambda mode=True: model  # type: ignore[method-assign,assignment]
    session = run(lambda: (model, args, kwargs), train=False, dtype=dtype)
    session.capture.how = "exported program"
    session.capture.forward_only = True
    return session


def capture_of(session: Session, files: Iterable[str]) -> Capture:
    session.capture.files = [f for f in files if f]
    return session.capture
