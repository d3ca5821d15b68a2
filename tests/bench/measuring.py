"""How the benchmarks measure: medians of ways that take turns, on the device's own clock, with the SM clock that was seen meanwhile."""

import argparse
import json
import statistics
import subprocess
import time
from collections.abc import Callable

import torch


def device_ms(function: Callable[[], object], device: torch.device) -> tuple[float, float]:
    """(milliseconds the device took, milliseconds the host took to ask for it)."""
    if device.type != "cuda":
        began = time.perf_counter()
        function()
        took = 1000 * (time.perf_counter() - began)
        return took, took
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(device)
    began = time.perf_counter()
    start.record()
    function()
    end.record()
    asked = time.perf_counter()
    torch.cuda.synchronize(device)
    return start.elapsed_time(end), 1000 * (asked - began)


def sustained_ms(function: Callable[[], object], device: torch.device, seconds: float = 1.0) -> float:
    """Milliseconds a call, over enough calls that the device is as warm as in a long run."""
    function()
    once, _ = device_ms(function, device)
    calls = max(int(1000 * seconds / max(once, 1e-3)), 1)

    def many() -> None:
        for _ in range(calls):
            function()

    return device_ms(many, device)[0] / calls


def sm_clock(function: Callable[[], object], device: torch.device) -> int | None:
    """MHz of the SM clock while `function` runs, as nvidia-smi tells; None without it."""
    if device.type != "cuda":
        return None
    function()
    function()
    try:
        command = ["nvidia-smi", "--query-gpu=clocks.sm", "--format=csv,noheader,nounits", f"--id=GPU-{torch.cuda.get_device_properties(device).uuid}"]
        return int(subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.split()[0])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None
    finally:
        torch.cuda.synchronize(device)


def in_turn(ways: dict[str, Callable[[], object]], device: torch.device, repeats: int) -> dict[str, dict]:
    """`ways` (name -> what to time) one after another, `repeats` times after a first round that warms up: medians in ms, and the clock."""
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for repeat in range(repeats + 1):
        for name, function in ways.items():
            times = device_ms(function, device)
            if repeat:
                taken[name].append(times)
    return {
        name: {
            "ms": statistics.median(device for device, _ in times),
            "host_ms": statistics.median(host for _, host in times),
            "sm_mhz": sm_clock(ways[name], device),
        }
        for name, times in taken.items()
    }


def peak_gib(function: Callable[[], object], device: torch.device) -> float | None:
    """The most memory that `function` holds on top of what is there before it."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    function()
    torch.cuda.synchronize(device)
    return (torch.cuda.max_memory_allocated(device) - before) / 2**30


def profile_rows(function: Callable[[], object], device: torch.device, calls: int = 1) -> list[dict]:
    """What takes most of the device's time in `function`, which repeats itself `calls` times: ms and count of one, name by name."""
    function()
    with torch.profiler.profile() as profiler:
        function()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    on_gpu = device.type == "cuda"
    events = [event for event in profiler.key_averages() if (event.device_type == torch.autograd.DeviceType.CUDA) == on_gpu]
    taken = [(event.self_device_time_total if on_gpu else event.self_cpu_time_total, event.count, event.key) for event in events]
    return [{"ms": time / 1000 / calls, "count": count // calls, "kernel": name[:90]} for time, count, name in sorted(taken, reverse=True)[:25]]


def relative_error(ours: torch.Tensor, exact: torch.Tensor) -> float:
    """|ours - exact| / |exact|, root mean square."""
    return ((ours.float() - exact.float()).norm() / exact.float().norm()).item()


def report(options: argparse.Namespace, measure: str, rows: list[dict]) -> None:
    """A table, or a line of JSON a row. The first value of a row names it."""
    settings = {name: value for name, value in vars(options).items() if name in ("size", "device", "resolution", "limit_gib")}
    if not options.json:
        print(f"\n{measure}")
    for row in rows:
        if options.json:
            print(json.dumps({"bench": options.bench, "measure": measure, **settings, **row}), flush=True)
        else:
            values = [
                f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in row.items() if key != "what" and value is not None
            ]
            print(f"  {row['what']:58} {'  '.join(values)}", flush=True)


@torch.inference_mode()
def take(options: argparse.Namespace, new_bench: Callable[[argparse.Namespace], object], measures: dict[str, Callable]) -> None:
    """Report the measures that `options` ask for, of one bench."""
    bench = new_bench(options)
    for name in options.only or measures:
        report(options, name, measures[name](bench))


def arguments(bench: str, description: str, measures: dict) -> argparse.ArgumentParser:
    """What every benchmark takes."""
    parser = argparse.ArgumentParser(description=description)
    parser.set_defaults(bench=bench)
    parser.add_argument("--size", choices=("small", "full"), default="small", help="a toy, or the published size in bfloat16")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", choices=measures, action="append", help="which of the measures to take, all without it")
    parser.add_argument("--json", action="store_true", help="a line of JSON a row")
    return parser
