"""`python -m flexmod bench`: its arguments, and one run."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from flexmod.bench import files, report, workers
from flexmod.bench.attention import reason
from flexmod.bench.peers import candidates
from flexmod.bench.rows import TOKENS
from flexmod.bench.setting import Setting
from flexmod.bench.suites import SUITES, Record, Suite
from flexmod.bench.timing import Budget
from flexmod.errors import ArgumentError, FlexmodError
from flexmod.kernels import tuned
from flexmod.kernels.choose import BACKENDS

SUMMARY = "flexmod beside every attention that is installed, interleaved in one process"
_ROUNDS, _QUICK_ROUNDS = 9, 3
_QUICK = 8  # times fewer tokens
_CPU_TOKENS, _CPU_WIDTH, _WIDTH = 2048, 512, 2048


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--suite", default="forward", help=f"comma-separated, of {', '.join(SUITES)}")
    add("--rows", default="", help="names of rows or parts of names, comma-separated; default all")
    add("--head-dim", default="128,64", help="of 128, 64; default both", metavar="D,D")
    add("--peers", default="", help="names or parts of names; 'none' for flexmod alone")
    add("--engine", default="", help="engines of flexmod to force, a column each; default its own")
    add("--rounds", type=int, help=f"default {_ROUNDS}; 0 builds kernels without timing")
    add("--seconds", type=float, help="begin nothing after that; what is measured is kept")
    add("--quick", action="store_true", help="an eighth of the tokens, few rounds")
    add("--tokens", type=int, help=f"batch x length; default {TOKENS}, {_CPU_TOKENS} on a CPU")
    add("--width", type=int, help=f"heads x head_dim; default {_WIDTH}, {_CPU_WIDTH} on a CPU")
    add("--device", help="cpu, cuda, cuda:1; default a GPU if any")
    add("--workers", type=int, default=0, help="processes that build all kernels before timing")
    add("--out", type=Path, help="folder for JSON and pictures; default benchmarks/results of a "
        "checkout for whole suites, else none", metavar="FOLDER")  # fmt: skip
    add("--tune", action="store_true", help="measure tiles of fa2 for what the rows stand for, and "
        "write tuning rows into flexmod/kernels/tuned of a checkout, or into --out")  # fmt: skip
    add("--picture", type=Path, help="only draw a result file again", metavar="JSON")


def run(options: argparse.Namespace) -> int:
    """Measure suites, or draw a result file.

    Raises:
        ArgumentError: an option names nothing that exists.
    """
    if options.picture is not None:
        print(files.draw(options.picture))
        return 0
    setting = make_setting(options)
    chosen = [_suite(name) for name in _split(options.suite)]
    folder = _folder(options)
    if options.tune:
        return _tune(options, setting, [suite.name for suite in chosen])
    if options.workers:
        workers.build(options, setting, chosen)
    finished = [(suite, *_measure(suite, setting, folder)) for suite in chosen]
    setting.progress.show("")
    for suite, records, _ in finished:
        if records:
            print(f"\n{report.table(suite, records, setting.absent)}")
    for path in [path for _, records, path in finished if path and records]:
        print(f"\nkept in {path}{_picture(path)}")
    _print_left(setting)
    return 0


def _tune(options: argparse.Namespace, setting: Setting, suites: list[str]) -> int:
    from flexmod.bench import tune

    folder = options.out or (tuned.FOLDER if files.results_folder() else None)
    if folder is None:
        raise ArgumentError("--tune needs --out FOLDER: this is no source checkout")
    directions = [suite for suite in suites if suite in ("forward", "backward")]
    for path in tune.run(setting, directions, folder):
        print(f"kept in {path}")
    _print_left(setting)
    return 0


def _print_left(setting: Setting) -> None:
    if setting.left:
        print(f"\nno time was left for: {', '.join(setting.left)}")


def _measure(
    suite: Suite, setting: Setting, folder: Path | None
) -> tuple[list[Record], Path | None]:
    """The records of a suite; each is printed and kept at once. Ctrl-C and errors of peers that
    break a whole process, such as an illegal access on a GPU, end the suite."""
    records: list[Record] = []
    path = files.result_path(folder, suite, setting) if folder else None
    try:
        for record in suite.measure(setting):
            setting.progress.show("")
            print(report.line(suite, record), flush=True)
            records.append(record)
            if path:
                files.write(path, suite, setting, records)
    except KeyboardInterrupt:
        setting.left.append(f"the rest of {suite.name} (interrupted)")
    except FlexmodError:
        raise
    except Exception as error:
        setting.left.append(f"the rest of {suite.name} ({reason(error)})")
    if path and records and setting.left:
        files.write(path, suite, setting, records)
    return records, path


def make_setting(options: argparse.Namespace) -> Setting:
    device = _device(options.device)
    on_cpu = device.type == "cpu"
    tokens = options.tokens or (_CPU_TOKENS if on_cpu else TOKENS)
    engines = _split(options.engine)
    for engine in engines:
        if engine not in BACKENDS:
            raise ArgumentError(f"--engine {engine!r} is none of {', '.join(BACKENDS)}")
    wanted = candidates(engines, options.peers)
    absent = {c.name: why for c in wanted if (why := c.absent(device)) is not None}
    for line in report.not_here(absent):
        print(line, file=sys.stderr)
    rounds = _QUICK_ROUNDS if options.quick else _ROUNDS
    return Setting(
        device=device,
        dtype=torch.float32 if on_cpu else torch.bfloat16,
        tokens=max(tokens // _QUICK, 64) if options.quick else tokens,
        width=options.width or (_CPU_WIDTH if on_cpu else _WIDTH),
        rounds=rounds if options.rounds is None else options.rounds,
        rows=options.rows,
        head_dims=[_number(text) for text in _split(options.head_dim)],
        candidates=[c for c in wanted if c.name not in absent],
        budget=Budget(options.seconds),
        absent=absent,
    )


def _folder(options: argparse.Namespace) -> Path | None:
    """Where results go: what is asked for; whole suites of a checkout to where its own lie."""
    if options.out is not None or options.rounds == 0:
        return options.out
    parts = options.rows or options.peers or options.engine or options.quick or options.tokens
    return None if parts or options.head_dim != "128,64" else files.results_folder()


def _picture(path: Path) -> str:
    try:
        return f" and {files.draw(path).name}"
    except NotImplementedError as error:
        return f"\n{error}"


def _suite(name: str) -> Suite:
    if name not in SUITES:
        raise ArgumentError(f"--suite {name!r} is none of {', '.join(SUITES)}")
    return SUITES[name]


def _device(text: str | None) -> torch.device:
    if text is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(text)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        why = str(error).splitlines()[0]
        raise ArgumentError(f"--device {text!r} cannot be used: {why}") from None
    return device


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _number(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise ArgumentError(f"--head-dim {text!r} is not a number")
    return int(text)
