"""One process of a heap over several: `python heap_process.py PROCESS PROCESSES FOLDER SECONDS '{"fails": ...}'`.

Its devices' memory is files (`file_driver`), the coordinator's store is FOLDER. It writes into the memory of its own
two ranks, reads all others', and prints "ok", or the error's type and message. Settings: fails (of the driver),
bytes, host (another one than this), dies ("hello": exits once that phase is over), multicast.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from qwenjax_ffi import symmetric_memory_mapping
from qwenjax_ffi.symmetric_memory_exchange import Rendezvous, SymmetricMemoryError
from tests.ffi.file_driver import FileDriver

RANKS_EACH = 2


class FolderStore:
    """A key-value store of files, each written at once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def set(self, key: str, value: str) -> None:
        name = self.folder / key.replace("/", "%")
        if name.exists():
            raise FileExistsError(name)
        written = name.with_suffix(f".{os.getpid()}")
        written.write_text(value)
        written.rename(name)

    def get(self, key: str, seconds: float) -> str | None:
        name = self.folder / key.replace("/", "%")
        deadline = time.monotonic() + seconds
        while not name.exists():
            if time.monotonic() > deadline:
                return None
            time.sleep(0.01)
        return name.read_text()


class Dying(Rendezvous):
    """Exits after a phase, without a word to anyone."""

    phase_of_death = ""

    def gather(self, phase: str, value: Any) -> list[Any]:
        found = super().gather(phase, value)
        if phase == self.phase_of_death:
            os._exit(0)
        return found


def main() -> None:
    process, processes, folder, seconds, settings = sys.argv[1:]
    asked: dict[str, Any] = json.loads(settings)
    if "host" in asked:
        symmetric_memory_mapping.host_identity = lambda: asked["host"]
    if asked.get("multicast"):
        os.environ[symmetric_memory_mapping.MULTICAST_VARIABLE] = "1"
    rendezvous = Dying(FolderStore(Path(folder)), "heap", int(process), int(processes), float(seconds))
    rendezvous.phase_of_death = asked.get("dies", "")
    local = {int(process) * RANKS_EACH + i: i for i in range(RANKS_EACH)}
    ranks = RANKS_EACH * int(processes)
    driver = FileDriver(asked.get("fails"), multicast=asked.get("multicast", False))
    try:
        memory = symmetric_memory_mapping.MappedMemory(driver, local, ranks, asked.get("bytes", 10000), rendezvous)
    except SymmetricMemoryError as error:
        print(f"{type(error).__name__}: {error}; live: {driver.live}")
        return
    words = memory.num_bytes // 4
    for rank in local:
        (ctypes.c_uint32 * words).from_address(memory.bases[rank])[:] = range(rank, rank + words)
    rendezvous.gather("written", True)
    seen = [list((ctypes.c_uint32 * words).from_address(memory.bases[rank])) for rank in range(ranks)]
    assert seen == [list(range(rank, rank + words)) for rank in range(ranks)]
    assert (memory.multicast_base is not None) == asked.get("multicast", False)
    rendezvous.gather("read", True)
    memory.close()
    memory.close()
    print(f"ok; live: {driver.live}")


if __name__ == "__main__":
    main()
