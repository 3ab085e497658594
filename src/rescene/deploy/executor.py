"""Flower's executor, which starts an app for every message, with two changes.

Flower hands an app its task's token on the command line. There every user of the machine can read it, and answer in the
site's name while the app works. Here the token is in a file without a name, which the app inherits.
Flower also never looks at a copy of the app that it has installed before. Here a broken one is removed first.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from flwr.supercore.cli.flower_superexec import flower_superexec
from flwr.supercore.constant import TASK_TYPE_TO_APPIO_API_ADDRESS_ARG, TASK_TYPE_TO_COMMAND
from flwr.supercore.superexec import run_superexec
from flwr.supercore.superexec.executor import ExecutionSpec, LaunchResult
from flwr.supercore.superexec.executor.subprocess_executor import SubprocessExecutor
from flwr.supercore.tls import get_client_tls_args

from rescene.deploy.federation_folder import broken_apps


class QuietExecutor(SubprocessExecutor):
    """Flower's executor, with the token in an unnamed file in place of the command line."""

    def launch(self, spec: ExecutionSpec) -> LaunchResult:
        """Start the process of one task. A process that cannot be started fails that task only."""
        output = subprocess.DEVNULL if spec.suppress_output else None
        try:
            for app in broken_apps(Path(os.environ["FLWR_HOME"])):
                shutil.rmtree(app, ignore_errors=True)
            with tempfile.TemporaryFile() as file:
                file.write(spec.token.encode())
                file.seek(0)
                subprocess.Popen(_command(spec, file.fileno()), pass_fds=[file.fileno()], stdout=output, stderr=output)
        except OSError as error:  # a full disk, say: this task fails, the next one may not
            return LaunchResult.failed(str(error))
        return LaunchResult.accepted()


def _command(spec: ExecutionSpec, token: int) -> list[str]:
    address = [TASK_TYPE_TO_APPIO_API_ADDRESS_ARG[spec.task_type], spec.runtime_api_address]
    trust = get_client_tls_args(spec.insecure, spec.root_certificates_path)
    parent = ["--parent-pid", str(spec.parent_pid)]
    return [TASK_TYPE_TO_COMMAND[spec.task_type], *address, "--token-file", f"/dev/fd/{token}", *trust, *parent]


if __name__ == "__main__":
    run_superexec.get_executor = lambda *args, **options: QuietExecutor()  # type: ignore[attr-defined]
    flower_superexec()
