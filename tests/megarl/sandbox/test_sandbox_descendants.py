import os
import subprocess
import sys
import threading

import psutil
import pytest
from eventually import eventually

from megarl.sandbox import process_tree

BEGETS = """
import subprocess, threading
threading.Thread(target=subprocess.run, args=(["sleep", "99"],)).start()
"""


@pytest.fixture
def family():
    """A child that a thread of this process started, and the child of that one's thread, which lives on."""
    started, over, children = threading.Event(), threading.Event(), []

    def start():
        children.append(subprocess.Popen([sys.executable, "-c", BEGETS]))
        started.set()
        over.wait()

    thread = threading.Thread(target=start)
    thread.start()
    started.wait()
    child = psutil.Process(children[0].pid)
    assert eventually(lambda: [each.name() for each in child.children()] == ["sleep"])
    (grandchild,) = child.children()
    yield {child.pid, grandchild.pid}
    grandchild.kill()
    children[0].wait()
    over.set()
    thread.join()


def test_descendants_are_found_without_a_look_at_other_processes(family, monkeypatch):
    monkeypatch.delattr(process_tree, "_processes")
    assert family <= set(process_tree._descendants())
    assert os.getpid() not in process_tree._descendants()


def test_descendants_are_found_where_the_kernel_lists_no_children(family, monkeypatch):
    expected = set(process_tree._descendants())
    monkeypatch.delattr(process_tree, "_children")
    monkeypatch.setattr(process_tree, "Path", lambda *parts: NoChildren(*parts))
    assert set(process_tree._descendants()) == expected >= family


class NoChildren(type(process_tree.Path())):
    def exists(self):
        return self.name != "children"
