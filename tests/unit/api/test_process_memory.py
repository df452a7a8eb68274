import subprocess
import sys

_HIDDEN = """
import ctypes
from shoal_service.process_memory import hide_process
print(ctypes.CDLL(None).prctl(3), hide_process(), ctypes.CDLL(None).prctl(3))  # 3: PR_GET_DUMPABLE
"""


def test_the_kernel_lets_only_root_read_a_hidden_process() -> None:
    shown = subprocess.run([sys.executable, "-c", _HIDDEN], check=True, capture_output=True, text=True)
    assert shown.stdout == "1 True 0\n"
