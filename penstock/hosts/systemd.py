"""A systemd unit for a worker, which starts it with the host, and again whenever it ends."""

from __future__ import annotations

import getpass
import sys
from collections.abc import Iterable
from typing import Final

UNIT: Final = """\
# Install as /etc/systemd/system/penstock-worker.service, then:
#   systemctl daemon-reload && systemctl enable --now penstock-worker
[Unit]
Description=Penstock worker
Wants=network-online.target
After=network-online.target
StartLimitIntervalSec=0

[Service]
ExecStart={command}
User={user}
Restart=always
RestartSec=3
KillMode=mixed
NoNewPrivileges=yes
ProtectSystem=full
PrivateTmp=yes

[Install]
WantedBy=multi-user.target
"""


def unit_of(options: Iterable[str]) -> str:
    """The unit file of a worker with these options, run by the current user with this Python."""
    command = [sys.executable, "-m", "penstock.cli", "worker", *options]
    return UNIT.format(command=" ".join(map(quoted, command)), user=getpass.getuser())


def quoted(word: str) -> str:
    """The word, escaped so that systemd takes every character of it literally."""
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return f'"{escaped}"' if escaped != word or any(character.isspace() for character in word) else word
