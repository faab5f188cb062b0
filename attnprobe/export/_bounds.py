"""What a script can show of an access outside a tensor.

The inputs lie beside pages that nobody may touch, and glibc checks what is written behind allocations. What
a library reads outside its own allocations only the scan's guards see; the script says so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from attnprobe.export._checks import parent
from attnprobe.export._template import fill

if TYPE_CHECKING:
    from attnprobe.export._choose import Subject

_GUARD: Final = '''
              |kept = []
              |
              |
              |def at_the_edge(tensor):
              |    """Return the same tensor with its memory right $side a page that nobody may touch."""
              |    storage, page = tensor.untyped_storage(), mmap.PAGESIZE
              |    size, closed = storage.nbytes(), 16 * mmap.PAGESIZE
              |    room = -(-size // page) * page
              |    memory = mmap.mmap(-1, room + 2 * closed)
              |    base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
              |    for start in (base, base + closed + room):
              |        ctypes.CDLL(None).mprotect(ctypes.c_void_p(start), ctypes.c_size_t(closed), 0)
end           |    start = closed + (room - size) // 64 * 64  # kernels may count on 64-byte alignment
!end          |    start = closed
              |    block = torch.frombuffer(memory, dtype=torch.uint8, count=size, offset=start)
              |    block.copy_(torch.empty(0, dtype=torch.uint8).set_(storage))
              |    kept.append((memory, block))
              |    place = (tensor.storage_offset(), tensor.shape, tensor.stride())
              |    return torch.empty(0, dtype=tensor.dtype).set_(block.untyped_storage(), *place)
              |
              |
              |def child():
              |    """Make the call with all inputs at the edge."""
              |    given = [at_the_edge(tensor) for tensor in inputs()]
earlier       |    with contextlib.suppress(Exception):
earlier       |        $earlier
              |    print("call", flush=True)
              |    signal.alarm(LIMIT)  # ends this process, wherever it is
              |    try:
              |        run(*given)
              |    except Exception as error:
              |        # A clear refusal is no failure.
              |        print(f"refused: {type(error).__name__}: {error}")
              |    print("returned", flush=True)
              |    os._exit(0)
'''


def main(flags: set[str], earlier: str) -> list[str]:
    """Return the lines after the call: guards, the child that runs, the parent that tells."""
    # glibc's checking malloc ends the process where something was written behind an allocation.
    checked = parent(GLIBC_TUNABLES="glibc.malloc.check=3", LD_PRELOAD="libc_malloc_debug.so.0")
    return [
        "",
        *fill(_GUARD, flags, earlier=earlier, side="before" if "end" in flags else "behind"),
        "",
        "",
        *checked,
    ]


def sides(subject: Subject) -> set[str]:
    """Return the flag `end` where the nearest access that the scan saw was behind an input, not before it."""
    seen: list[dict[str, Any]] = subject.result.detail.get("bounds", [])
    inputs = [one for one in seen if not str(one.get("where", "")).startswith("an allocation")]
    offsets = [int(one.get("offset", 0)) for one in inputs or seen]
    return {"end"} if not offsets or min(offsets, key=abs) >= 0 else set()


def beyond_the_script(subject: Subject) -> str:
    """Return a note where something was read outside memory that the library allocated, else ""."""
    seen: list[dict[str, Any]] = subject.result.detail.get("bounds", [])
    places = [str(one.get("where", "")) for one in seen if one.get("access") != "write"]
    own = [place for place in places if place.startswith("an allocation")]
    if not own:
        return ""
    return (
        f"It cannot show what the scan saw read outside {', '.join(own)}: that is the library's own memory."
    )
