"""Backends that misbehave, and real supervisors to run them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

MISBEHAVING = """
import ctypes, mmap, os, signal, subprocess, sys, threading, time
from torch.nn.functional import scaled_dot_product_attention as right

def good(*a, **k): return right(*a, **k)

def segfaults(*a, **k): ctypes.string_at(0)
def leaves_with_0(*a, **k): os._exit(0)
def leaves_with_1(*a, **k): os._exit(1)
def sys_exits(*a, **k): sys.exit(1)
def sys_exits_with_0(*a, **k): sys.exit(0)
def kills_itself(*a, **k): os.kill(os.getpid(), signal.SIGKILL)
def aborts(*a, **k): os.abort()
def interrupts(*a, **k): raise KeyboardInterrupt

def says_fatal(*a, **k):
    print('some noise')
    print('FATAL: kernel not built', flush=True)
    os._exit(3)

def says_fatal_on_stderr(*a, **k):
    print('FATAL: kernel not built', file=sys.stderr)
    print('', file=sys.stderr)
    os._exit(3)

def sys_exits_in_words(*a, **k): sys.exit('FATAL: kernel not built')

def hangs(*a, **k):
    while True: time.sleep(1)

def hangs_ignoring(*a, **k):
    for one in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP): signal.signal(one, signal.SIG_IGN)
    while True: time.sleep(1)

def hangs_with_the_gil(*a, **k):
    ctypes.PyDLL(None).sleep(3600)

def chatters(*a, **k):
    for _ in range(10):
        os.write(1, b'x' * 1000_000 + b'\\n')
    return right(*a, **k)

def note(pid):
    with open(os.environ['LEFT_BEHIND'], 'a') as file: file.write(f'{pid}\\n')

def leaves_a_child(*a, **k):
    pid = os.fork()
    if pid == 0:
        while True: time.sleep(60)
    note(pid)
    return right(*a, **k)

def leaves_a_child_and_dies(*a, **k):
    leaves_a_child(*a, **k)
    os._exit(1)

def leaves_a_session(*a, **k):
    note(subprocess.Popen(['sleep', '600'], start_new_session=True).pid)
    return right(*a, **k)

def leaves_a_session_and_dies(*a, **k):
    leaves_a_session(*a, **k)
    os._exit(1)

def leaves_a_big_session_and_dies(*a, **k):
    # Half a gigabyte of small pages: killed, it takes a while to be gone.
    out, into = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.setsid()
        memory = mmap.mmap(-1, 512 << 20)
        memory.madvise(mmap.MADV_NOHUGEPAGE)
        for at in range(0, len(memory), mmap.PAGESIZE): memory[at] = 1
        os.write(into, b'x')
        while True: time.sleep(60)
    note(pid)
    os.read(out, 1)
    time.sleep(1)  # so that the next worker is ready
    os._exit(1)

def forks_and_both_return(*a, **k):
    note(os.fork() or os.getpid())
    return right(*a, **k)

def closes_everything(*a, **k):
    os.closerange(3, 1024)
    return right(*a, **k)

def sockets():
    for fd in range(3, 64):
        try:
            if os.readlink(f'/proc/self/fd/{fd}').startswith('socket:'):
                yield fd
        except OSError:
            pass

def hangs_up_and_goes_on(*a, **k):
    note(os.getpid())
    for fd in sockets():
        os.close(fd)
    while True: time.sleep(1)

def talks_nonsense(*a, **k):
    note(os.getpid())
    for fd in sockets():
        os.write(fd, b'nonsense')
    while True: time.sleep(1)

def dies_later(*a, **k):
    def die():
        time.sleep(0.3)
        os._exit(9)
    threading.Thread(target=die, daemon=True).start()
    return right(*a, **k)

died = os.path.join(os.path.dirname(__file__), 'died')
def dies_once(*a, **k):
    if not os.path.exists(died):
        open(died, 'w').close()
        os._exit(1)
    return right(*a, **k)

def odd_words(*a, **k): raise ValueError('\\udc80 \\x1b[31m \\x00')
"""


@pytest.fixture(scope="session")
def misbehaving(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the path of a file of callables that misbehave."""
    path = tmp_path_factory.mktemp("backends") / "bad.py"
    path.write_text(MISBEHAVING)
    return str(path)


@pytest.fixture(scope="session")
def left_behind(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return the file in which backends note the processes that they leave behind."""
    path = tmp_path_factory.mktemp("left") / "pids"
    path.write_text("")
    os.environ["LEFT_BEHIND"] = str(path)
    yield path
    del os.environ["LEFT_BEHIND"]
