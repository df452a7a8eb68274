"""The user's modules do not take the place of those that Python, Ray and Shoal import."""

import subprocess
import sys
from pathlib import Path

import shoal_workers

ROOT = Path(shoal_workers.__path__[0]).parent
_PROGRAM = """
import sys
sys.path.insert(0, {root!r})
from shoal_workers.forkserver.code_path import admit_code, leave_out_code, restore_code
leave_out_code()
import secrets
print(hasattr(secrets, "token_hex"))
if {is_script}:
    del sys.modules["secrets"]
    sys.path.insert(0, "folder")
    restore_code()
else:
    print(admit_code())
import secrets, resource, yaml, mine
print(hasattr(secrets, "token_hex"), hasattr(resource, "getrusage"), hasattr(yaml, "safe_load"), mine.VALUE)
"""


def _run(folder: Path, *, is_script: bool) -> list[str]:
    for name in ("secrets", "resource", "yaml", "mine"):
        (folder / f"{name}.py").write_text("VALUE = 7\n")
    program = folder / "elsewhere" / "program.py"
    program.parent.mkdir()
    program.write_text(_PROGRAM.format(root=str(ROOT), is_script=is_script))
    done = subprocess.run(
        [sys.executable, str(program)],
        cwd=folder,
        env={"PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.splitlines()


def test_a_task_or_loop_gets_its_modules_but_for_names_that_are_taken(tmp_path: Path) -> None:
    assert _run(tmp_path, is_script=False) == ["True", "['resource', 'secrets', 'yaml']", "True True True 7"]


def test_a_script_gets_all_of_its_modules(tmp_path: Path) -> None:
    assert _run(tmp_path, is_script=True) == ["True", "False False False 7"]
