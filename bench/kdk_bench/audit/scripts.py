"""`kdk audit --script`: a training script as it is. A step goes from the first call of a model to the end of the optimiser's."""

from __future__ import annotations

import contextlib
import os
import runpy
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

from kdk.errors import UsageError
from kdk_bench.audit import counting
from kdk_bench.audit.recorder import Session
from kdk_bench.audit.redirecting import Redirect
from kdk_bench.audit.running import attempt
from kdk_bench.audit.trace import Capture


class _Enough(BaseException):
    """Ends the script after the last step. No Exception: scripts catch those."""


def run_script(file: str, arguments: Sequence[str], steps: int) -> Capture:
    """The capture of a script's first steps; of all it did when it never calls an optimiser."""
    if not Path(file).is_file():
        raise UsageError("AUDIT-SCRIPT", "no such script", value=file, way_out="the path of a Python file")
    if steps < 1:
        raise UsageError("AUDIT-STEPS", "--steps", value=steps, limit="at least 1")
    session = Session(f"script, {steps} steps")
    redirect = Redirect(session)
    stepper = _Steps(session, steps)
    session.stepped = stepper.stepped
    with redirect.active(), stepper.watching(), _as_main(file, arguments), session.running():
        attempt(session, lambda: _run(file))
    session.end()
    capture = session.capture
    capture.files = [file]
    if not stepper.count:
        capture.forward_only = True
        capture.notes.append("the script called no optimiser: forward only")
    elif stepper.count < steps:
        capture.notes.append(f"the script ended after {stepper.count} steps")
    if not capture.steps and not capture.error:
        capture.error = "the script called no torch.nn.Module in this process; others that it starts are not seen"
    return capture


def _run(file: str) -> None:
    process, leave = os.getpid(), os._exit

    def end(code: int) -> None:
        """os._exit would end the audit without a report; a forked process ends by it as it is."""
        if os.getpid() != process:
            leave(code)
        raise SystemExit(code)

    try:
        with mock.patch.object(os, "_exit", end):
            runpy.run_path(file, run_name="__main__")
    except _Enough:
        pass
    except SystemExit as ended:
        if ended.code not in (None, 0):
            raise
    finally:
        if os.getpid() != process:  # a copy of this process: the report is the first one's
            sys.stdout.flush()
            leave(0)


@contextlib.contextmanager
def _as_main(file: str, arguments: Sequence[str]) -> Iterator[None]:
    """sys.argv and the first entry of sys.path as `python file` sets them."""
    folder = str(Path(file).resolve().parent)
    with mock.patch.object(sys, "argv", [file, *arguments]), mock.patch.object(sys, "path", [folder, *sys.path]):
        yield


class _Steps:
    """Begins and ends the session's steps."""

    def __init__(self, session: Session, wanted: int) -> None:
        self.session, self.wanted, self.count = session, wanted, 0

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        original = nn.Module.__call__
        steps = self

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            steps.before(module, args, kwargs)
            return original(module, *args, **kwargs)

        session = self.session

        def uncompiled(model: Any = None, **options: Any) -> Any:
            session.capture.event("note", "torch.compile", session.places.line())
            if "torch.compile is left out: the run is eager" not in session.capture.notes:
                session.capture.notes.append("torch.compile is left out: the run is eager")
            return model if model is not None else (lambda function: function)

        with mock.patch.object(nn.Module, "__call__", call), mock.patch.object(torch, "compile", uncompiled):
            yield

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        recorder = self.session.recorder
        if recorder.step is not None or self.session.places.stack or isinstance(module, nn.modules.loss._Loss):
            return
        if id(module) not in self.session.places.names:
            self.session.places.name(module)
        memory, roots = self.session.capture.memory, self.session.places.roots
        tensors = {id(t): t for root in roots for t in (*root.parameters(), *root.buffers())}
        memory["parameters"] = counting.moved(tensors.values())
        self.session.begin((args, kwargs), keep=not self.session.capture.steps, already=list(tensors.values()))

    def stepped(self, optimizer: Any) -> None:
        """The optimiser has done its step."""
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        self.session.capture.memory["gradients"] = counting.moved(gradients)
        self.session.end()
        self.count += 1
        if self.count >= self.wanted:
            raise _Enough
