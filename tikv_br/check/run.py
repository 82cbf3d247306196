"""Run all probes at once, each with a time of its own, and count what they say."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence

from tikv_br.check.cluster_probes import CLUSTER_PROBES
from tikv_br.check.feature_probes import FEATURE_PROBES
from tikv_br.check.machine_probes import MACHINE_PROBES
from tikv_br.check.probe import NotAsked, Probe, Result, Status, Verdict, fail, skipped
from tikv_br.check.storage_probes import remove_scratch, storage_probes
from tikv_br.check.surroundings import CheckOptions, Surroundings
from tikv_br.errors import StorageError, TikvBrError


def check(options: CheckOptions, on_result: Callable[[Result], None] = lambda _result: None) -> list[Result]:
    """What every probe says, in the order of the probes; ``on_result`` gets each as it comes, in the caller's thread."""
    probes = (*CLUSTER_PROBES, *FEATURE_PROBES, *storage_probes(options.storage), *MACHINE_PROBES)
    with Surroundings(options) as around:
        results = run_probes(probes, around, on_result)
        with contextlib.suppress(StorageError, NotAsked):  # the probes have told
            remove_scratch(around)
    return results


def count(results: Sequence[Result]) -> dict[Status, int]:
    """How many say what."""
    counted = Counter(result.verdict.status for result in results)
    return {status: counted[status] for status in Status}


def run_probes(
    probes: Sequence[Probe], around: Surroundings, on_result: Callable[[Result], None] = lambda _result: None
) -> list[Result]:
    """Run probes at the same time. One that is not done in its time has failed; it is left to itself."""
    done: queue.SimpleQueue[tuple[int, Verdict]] = queue.SimpleQueue()
    began = time.monotonic()
    for index, probe in enumerate(probes):
        # A daemon: whoever hangs, in a dead file system say, must not keep the program from ending.
        threading.Thread(
            target=_look, args=(index, probe, around, done), name=f"probe-{probe.name}", daemon=True
        ).start()
    results: dict[int, Result] = {}
    limits = {index: probe.seconds or around.options.timeout for index, probe in enumerate(probes)}

    def book(index: int, verdict: Verdict) -> None:
        results[index] = Result(probes[index].name, verdict, round(time.monotonic() - began, 3))
        on_result(results[index])

    while len(results) < len(probes):
        waiting = {index: limit for index, limit in limits.items() if index not in results}
        index = min(waiting, key=lambda each: waiting[each])
        try:
            found, said = done.get(timeout=max(began + waiting[index] - time.monotonic(), 0.0))
        except queue.Empty:
            book(index, fail(f"no answer within {waiting[index]:g} s", "Check the network, or allow more: --timeout."))
            continue
        if found not in results:
            book(found, said)
    return [results[index] for index in range(len(probes))]


def _look(index: int, probe: Probe, around: Surroundings, done: queue.SimpleQueue[tuple[int, Verdict]]) -> None:
    said = fail("it ended by a defect of tikv-br", "Please report it, with what stands on stderr.")
    try:
        said = probe.look(around)
    except NotAsked as reason:
        said = skipped(str(reason))
    except TikvBrError as error:
        said = fail(error.message, error.hint)
    finally:
        done.put((index, said))
