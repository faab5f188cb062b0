"""The progress of a scan on standard error: a bar on a terminal, nothing elsewhere."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from attnprobe.run.scan import Progress, Scan


@contextlib.contextmanager
def shown(scan: Scan, *, wanted: bool | None) -> Iterator[None]:
    """Show a scan's progress while it runs; None: where standard error is a terminal and no CI."""
    if wanted is None:
        wanted = sys.stderr.isatty() and not os.environ.get("CI")
    if not wanted:
        yield
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    console = Console(stderr=True, no_color=bool(os.environ.get("NO_COLOR")) or None)
    bar = Bar(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[failing]} failing"),
        TimeRemainingColumn(),
        console=console,
        transient=True,
    )
    with bar:
        task = bar.add_task("probing", total=len(scan.plan.cases), failing=0)

        def show(progress: Progress) -> None:
            if progress.stage == "cases":
                bar.update(task, completed=progress.done, failing=progress.failing)
            else:
                bar.update(task, description="narrowing down", failing=progress.failing)

        scan.show = show
        yield
