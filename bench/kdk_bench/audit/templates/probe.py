"""Measures the operators of one model on this machine's device: which run there, which on the host, which fail, and how fast.

    python probe.py --device tpu|neuron|xla|cuda|cpu [--out probe.json] [--seconds 1500]

Written by `kdk audit --emit-probe`; it needs torch and the device's plugin, nothing else. Then, where the model is:
`kdk audit MODEL --evidence probe.json`.

Every operator runs with random tensors of the model's shapes and dtypes. Its result is compared with the CPU's (an operator that
runs and answers wrongly is no support), what the plugin says about moving to the host is watched, and it is timed. Results are
written after every operator, so that a crash or the end of the hour loses nothing: run it again and it goes on.
"""

import argparse
import contextlib
import datetime
import io
import json
import os
import sys
import time
import warnings

import torch

OPERATORS: list = []
REPEAT = 10
DTYPES = {"float64": 1e-6, "float32": 2e-2, "bfloat16": 6e-2, "float16": 6e-2}  # accelerators round float32 products too


def tensor(text, generator):
    """A random tensor of "float32[2, 3] channels_last"."""
    dtype, _, rest = text.partition("[")
    sizes, _, layout = rest.partition("]")
    shape = [int(n) for n in sizes.split(",") if n.strip()]
    kind = getattr(torch, dtype)
    if kind.is_floating_point or kind.is_complex:
        made = (torch.randn(shape, generator=generator) * 0.5).to(kind)
    elif kind == torch.bool:
        made = torch.rand(shape, generator=generator) > 0.5
    else:
        made = torch.zeros(shape, dtype=kind)  # an index that is always inside
    if layout.strip() == "channels_last":
        made = made.contiguous(memory_format=torch.channels_last)
    elif layout.strip() == "strided" and made.dim() >= 2:
        made = made.transpose(-1, -2).contiguous().transpose(-1, -2)
    return made


def build(value, device, generator):
    """Arguments from JSON, tensors on the CPU."""
    if isinstance(value, list):
        return [build(v, device, generator) for v in value]
    if not isinstance(value, dict):
        return value
    if "tensor" in value:
        return tensor(value["tensor"], generator)
    if "torch" in value:
        return getattr(torch, value["torch"])
    if "device" in value:
        return torch.device(device)
    if "float" in value:
        return float(value["float"])
    if "complex" in value:
        return complex(*value["complex"])
    return {k: build(v, device, generator) for k, v in value.items()}


def moved(value, device):
    if isinstance(value, torch.Tensor):
        return value.clone() if str(device) == "cpu" else value.to(device)
    if isinstance(value, torch.device):
        return torch.device(device)
    if isinstance(value, (list, tuple)):
        return [moved(v, device) for v in value]
    if isinstance(value, dict):
        return {k: moved(v, device) for k, v in value.items()}
    return value


def wait(device):
    """Until the device is done."""
    kind = torch.device(device).type
    module = getattr(torch, kind, None)
    if kind == "xla":
        import torch_xla

        torch_xla.sync(wait=True)
    elif kind != "cpu" and module is not None and hasattr(module, "synchronize"):
        module.synchronize()


def fallbacks(kind):
    """What the plugin itself counts as run on the host, as a function to be asked before and after."""
    if kind == "xla":
        import torch_xla.debug.metrics as metrics

        return lambda: {n: metrics.counter_value(n) for n in metrics.counter_names() if n.startswith("aten::")}
    if kind == "neuron":
        import torch_neuronx

        utils = getattr(torch_neuronx, "utils", None)
        listing = getattr(torch_neuronx, "get_fallback_ops", None) or getattr(utils, "get_fallback_ops", None)
        if listing is not None:
            return lambda: {str(n): 1 for n in listing()}
    module = getattr(torch, kind, None)
    listing = getattr(module, "get_fallback_ops", None)
    return (lambda: {str(n): 1 for n in listing()}) if listing is not None else (dict)


@contextlib.contextmanager
def heard(text):
    """Warnings and what is printed to the streams meanwhile."""
    stream = io.StringIO()
    with warnings.catch_warnings(record=True) as caught, contextlib.redirect_stderr(stream):
        warnings.simplefilter("always")
        yield
    text.append(" ".join([stream.getvalue(), *(str(w.message) for w in caught)]))


def flat(value):
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [t for v in value for t in flat(v)]
    return []


def wrong(name, expected, got):
    """Why the device's result is not the CPU's, or "". What is random, uninitialised or only a place is compared by its shape."""
    for e, g in zip(flat(expected), flat(got)):
        g = g.cpu()
        if e.shape != g.shape or e.dtype != g.dtype:
            return f"{g.dtype}{list(g.shape)} where the CPU gives {e.dtype}{list(e.shape)}"
        if any(word in name for word in ("rand", "bernoulli", "dropout", "empty", "multinomial", "normal_", "uniform_", "exponential")):
            continue
        if e.is_floating_point() or e.is_complex():
            wide = torch.complex128 if e.is_complex() else torch.float64
            e, g = e.to(wide), g.to(wide)
            size = float(e.abs().nan_to_num(0, 0, 0).max()) if e.numel() else 0.0
            limit = DTYPES.get(str(expected_dtype(expected)), 2e-2) * max(size, 1e-6)
            both = torch.isfinite(e) & torch.isfinite(g)
            if bool((torch.isfinite(e) != torch.isfinite(g)).any()):
                return "other infinities or NaNs than the CPU"
            if e.numel() and float((e - g).abs()[both].max() if bool(both.any()) else 0.0) > limit:
                return f"differs from the CPU by {float((e - g).abs()[both].max()):.3g} where values reach {size:.3g}"
        elif not torch.equal(e, g):
            return "differs from the CPU"
    return ""


def expected_dtype(value):
    tensors = flat(value)
    return str(tensors[0].dtype).replace("torch.", "") if tensors else ""


def measure(row, device, count):
    """One operator: {"outcome": native, fallback, error, wrong or skipped, "detail", "seconds"}."""
    op, overload, arguments, tensors, _ = row
    name = op.partition("::")[2]
    func = getattr(getattr(torch.ops.aten, name), overload)
    generator = torch.Generator().manual_seed(0)
    result = {"op": op if overload == "default" else f"{op}.{overload}", "tensors": tensors}
    args = build(arguments[0], device, generator)
    kwargs = {k: build(v, device, generator) for k, v in arguments[1].items()}  # one may be called "device"
    try:
        expected = func(*moved(args, "cpu"), **moved(kwargs, "cpu"))
    except Exception as error:  # random values are not what the operator takes
        return {**result, "outcome": "skipped", "detail": f"does not run on the CPU with random values: {first(error)}"}
    there = moved(args, device), moved(kwargs, device)
    before = count()
    said: list = []
    try:
        with heard(said):
            got = func(*there[0], **there[1])
            wait(device)
    except Exception as error:
        return {**result, "outcome": "error", "detail": first(error)}
    after = count()
    difference = wrong(name, expected, got)
    words = ("fallback", "fall back", "falling back", "on the cpu", "run on cpu", "host cpu")
    counted = [n for n in after if after[n] != before.get(n)]
    outcome, detail = "native", ""
    if counted or any(word in said[0].lower() for word in words):
        outcome, detail = "fallback", ", ".join(counted) or said[0].strip()[:200]
    if difference:
        outcome, detail = "wrong", difference
    start = time.perf_counter()
    for _ in range(REPEAT):
        func(*there[0], **there[1])
    wait(device)
    return {**result, "outcome": outcome, "detail": detail, "seconds": (time.perf_counter() - start) / REPEAT}


def first(error):
    return f"{type(error).__name__}: {error}".strip().splitlines()[0][:300]


def name_of(kind):
    """The platform as kdk names it, and the device in words."""
    module = getattr(torch, kind, None)
    words = kind
    with contextlib.suppress(Exception):
        words = getattr(module, "get_device_name")(0)  # noqa: B009
    return kind, words


def versions():
    from importlib.metadata import PackageNotFoundError, version

    found = []
    for package in ("torch", "torch_tpu", "torch-neuronx", "torch_xla", "libtpu"):
        with contextlib.suppress(PackageNotFoundError):
            found.append(f"{package} {version(package)}")
    return ", ".join(found)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", required=True)
    parser.add_argument("--out", default="probe.json")
    parser.add_argument("--seconds", type=float, default=1500.0)
    parser.add_argument("--plugin", help="a package to import first")
    options = parser.parse_args(arguments)
    if options.plugin:
        __import__(options.plugin)
    kind = torch.device(options.device).type
    platform, words = name_of(kind)
    done = {}
    if os.path.exists(options.out):
        with open(options.out) as file:
            done = {json.dumps([r["op"], r["tensors"]]): r for r in json.load(file)["ops"]}
    count = fallbacks(kind)
    end = time.time() + options.seconds
    report = {"schema": "kdk.probe/1", "platform": platform, "device": words, "versions": versions()}
    report["date"] = datetime.date.today().isoformat()
    left = 0
    for row in OPERATORS:
        key = json.dumps([row[0] if row[1] == "default" else f"{row[0]}.{row[1]}", row[3]])
        if key in done:
            continue
        if time.time() > end:
            left += 1
            continue
        # Should it kill the process, the next run finds it so and goes on behind it.
        done[key] = {"op": json.loads(key)[0], "tensors": row[3], "outcome": "error", "detail": "the process ended"}
        write(options.out, report, done)
        done[key] = measure(row, options.device, count)
        write(options.out, report, done)
    write(options.out, report, done)
    outcomes: dict = {}
    for row in done.values():
        outcomes[row["outcome"]] = outcomes.get(row["outcome"], 0) + 1
    print(", ".join(f"{n} {o}" for o, n in sorted(outcomes.items())), f"; {left} left for another run" if left else "", "->", options.out)
    return 0


def write(path, report, done):
    with open(path + ".part", "w") as file:
        json.dump({**report, "ops": list(done.values())}, file, indent=0)
    os.replace(path + ".part", path)


if __name__ == "__main__":
    sys.exit(main())
