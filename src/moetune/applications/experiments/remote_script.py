"""What runs at the far end of an ssh connection: POSIX sh, sent over standard input.

The command that ssh is given only reads a script from standard input and runs it, so that neither
this machine's list of processes nor the host's shows a secret; it is the same for every login shell.

The server runs in a session of its own. A reader waits for `stop`, for the end of the connection, and
for signs of life; a guard ends the server's processes when the first two come or the last one stays
away. What the guard ends is found by a variable in the processes' environment, which also one that
left its parents and its session still carries.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from moetune.applications.experiments.processes import MARK

BOOT = 'exec sh -c \'read -r n && s=$(dd bs=1 count="$n" 2>/dev/null) && eval "$s"\''
"""The command for the login shell; csh and fish read it as sh does."""

_SILENT_BEATS = 8
"""So many signs of life may be missing: a connection that is only slow is not taken for a dead one."""

_FUNCTIONS = r"""
if sleep 0.2 2>/dev/null; then step=0.2 each=5; else step=1 each=1; fi
marked() {
  grep -l -s -F "$variable=$mark" /proc/[0-9]*/environ 2>/dev/null | sed 's,^/proc/\([0-9]*\)/.*,\1,'
}
has() { case " $(marked | tr '\n' ' ')" in *" $1 "*) return 0 ;; *) return 1 ;; esac; }
end_all() {
  left=$((limit * each))
  if [ -n "$1" ] && has "$1"; then
    kill -TERM "$1" 2>/dev/null
    while [ "$left" -gt 0 ] && has "$1"; do sleep "$step"; left=$((left - 1)); done
    n=$((2 * each))
    while [ "$n" -gt 0 ] && [ "$left" -gt 0 ] && [ -n "$(marked)" ]; do
      sleep "$step"; left=$((left - 1)); n=$((n - 1))
    done
  fi
  if [ "$left" -gt 0 ]; then
    for p in $(marked); do kill -TERM "$p" 2>/dev/null; done
    while [ "$left" -gt 0 ] && [ -n "$(marked)" ]; do sleep "$step"; left=$((left - 1)); done
  fi
  n=$((10 * each))
  while [ "$n" -gt 0 ] && [ -n "$(marked)" ]; do
    for p in $(marked); do kill -KILL "$p" 2>/dev/null; done
    sleep "$step"; n=$((n - 1))
  done
  set -- $(marked)
  [ "$#" -eq 0 ] || say left "$@"
}
run_stop() {
  ( variables; exec 3<&-; stop_command ) >&2 & p=$!
  n=$(((limit + 30) * each))
  while [ "$n" -gt 0 ] && kill -0 "$p" 2>/dev/null; do sleep "$step"; n=$((n - 1)); done
  [ "$n" -gt 0 ] || kill -KILL "$p" 2>/dev/null
  wait "$p" || say failed "the stop command ended with $?"
}
"""

SERVER = r"""
command -v setsid >/dev/null 2>&1 || { say failed 'the host has no setsid (util-linux)'; exit 1; }
dir=$(mktemp -d "${TMPDIR:-/tmp}/moetune.XXXXXX") || { say failed 'no temporary folder'; exit 1; }
exec 3<&0 </dev/null
(
  trap '' HUP INT PIPE TERM
  n=0
  while IFS= read -r line <&3 && [ "$line" != stop ]; do n=$((n + 1)); echo "$n" >"$dir/beat"; done
  : >"$dir/stop"
) >/dev/null & reader=$!
(
  trap '' HUP INT PIPE TERM
  exec 3<&-
  silent=0 last=
  while [ ! -e "$dir/stop" ]; do
    sleep "$pause"
    now=
    [ ! -e "$dir/beat" ] || read -r now <"$dir/beat"
    if [ "$now" = "$last" ]; then silent=$((silent + 1)); else silent=0 last=$now; fi
    [ "$silent" -lt "$silence" ] || : >"$dir/stop"
  done
  [ -z "$stops" ] || run_stop
  pid=
  [ ! -e "$dir/pid" ] || read -r pid <"$dir/pid"
  end_all "$pid"
) & guard=$!
if [ -n "$follows" ]; then
  (
    trap '' PIPE
    exec 3<&-
    while [ -d "$dir" ] && [ ! -e "$dir/stop" ]; do
      ( variables; export "$variable=$mark"; logs_command ) 2>&1
      sleep 2
    done
  ) &
  exec 4>&2
else
  exec 4>&1
fi
(
  exec 3<&-
  umask "$mask"
  variables
  export "$variable=$mark"
  export SHELL_FOLDER="$dir"
  server_command
) >&4 2>&4
code=$?
[ -n "$stops" ] && [ "$code" -eq 0 ] || : >"$dir/stop"
trap '' PIPE
say exited "$code"
wait "$guard"
kill -KILL "$reader" 2>/dev/null
rm -rf "$dir"
exit 0
"""


@dataclass(frozen=True, slots=True)
class FarServer:
    """What the far end is to run.

    Attributes:
        arguments: of the server.
        variables: that differ from the login's own; an empty value takes one out.
        folder: working directory, empty: the login's.
        cache: name of its folder of compiled kernels, empty: the server's own.
        stop: arguments of the command that stops it.
        logs: arguments of the command that prints its log.
        stop_s: time for an orderly end.
        beat_s: time between two signs of life.
    """

    arguments: Sequence[str]
    variables: Mapping[str, str]
    folder: str = ""
    cache: str = ""
    stop: Sequence[str] = ()
    logs: Sequence[str] = ()
    stop_s: float = 60.0
    beat_s: float = 15.0


def framed(script: str) -> str:
    """A script as `BOOT` reads it."""
    return f"{len(script.encode())}\n{script}"


def head(nonce: str, mark: str = "", stop_s: float = 1.0) -> str:
    """What every script begins with."""
    return "\n".join(
        [
            f"nonce={shlex.quote(nonce)} variable={MARK} mark={shlex.quote(mark)} limit={math.ceil(stop_s)}",
            "mask=$(umask); umask 077",
            'say() { printf \'%s %s\\n\' "$nonce" "$*" >&2; }',
            "variables() { :; }",
            "",
        ]
    )


def server_script(server: FarServer, nonce: str, mark: str) -> str:
    """The script that runs a server until it is told to end it, or the connection ends."""
    changed = "; ".join(_variable(name, value) for name, value in server.variables.items())
    # The shell that becomes the server writes down its own id, which is that of its session.
    begin = """'echo "$$" >"$SHELL_FOLDER/pid.new" && mv "$SHELL_FOLDER/pid.new" "$SHELL_FOLDER/pid";"""
    begin += """ unset SHELL_FOLDER; exec "$@"'"""
    there = f"cd {shlex.quote(server.folder)} || exit 126; " if server.folder else ""
    # POSIX promises whole seconds only; every sleep in use takes fractions.
    pause = 1 if server.beat_s >= 1 else 0.2
    lines = [
        head(nonce, mark, server.stop_s) + _FUNCTIONS,
        f"variables() {{ {changed or ':'}; {_cache(server.cache)} {there}:; }}",
        f"server_command() {{ exec setsid sh -c {begin} moetune {shlex.join(server.arguments)}; }}",
        f"stop_command() {{ exec {shlex.join(server.stop) or ':'}; }}",
        f"logs_command() {{ exec {shlex.join(server.logs) or ':'}; }}",
        f"stops={'yes' if server.stop else ''} follows={'yes' if server.logs else ''}",
        f"pause={pause} silence={math.ceil(_SILENT_BEATS * server.beat_s / pause)}",
    ]
    return "\n".join(lines) + SERVER


def marked_script(nonce: str, mark: str) -> str:
    """The script that says which processes carry a mark."""
    return head(nonce, mark) + _FUNCTIONS + "say pids $(marked)\n"


def stop_script(nonce: str, mark: str, stop: Sequence[str], stop_s: float) -> str:
    """The script that ends the processes that carry a mark."""
    command = f"stop_command() {{ exec {shlex.join(stop) or ':'}; }}\n"
    return head(nonce, mark, stop_s) + _FUNCTIONS + command + ("run_stop\n" if stop else "") + "end_all ''\n"


def port_script(nonce: str, port: int, tried: int) -> str:
    """The script that finds a port on which nobody listens, from one on."""
    return head(nonce) + (
        f"port={port} end={port + tried}\n"
        "used=$(cat /proc/net/tcp /proc/net/tcp6 2>/dev/null |"
        """ awk '$4 == "0A" { sub(/.*:/, "", $2); print $2 }' | tr '\\n' ' ')\n"""
        'while [ "$port" -lt "$end" ]; do\n'
        '  case " $used" in *" $(printf %04X "$port") "*) port=$((port + 1)) ;; *) break ;; esac\n'
        "done\n"
        'say port "$port"\n'
    )


def gpu_script(nonce: str) -> str:
    """The script that lists the GPUs of a host and what computes on them."""
    return head(nonce) + (
        "command -v nvidia-smi >/dev/null 2>&1 || exit 0\n"
        "nvidia-smi --query-gpu=index,uuid,memory.used,memory.total,name --format=csv,noheader,nounits |"
        ' while IFS= read -r line; do say gpu "$line"; done\n'
        "nvidia-smi --query-compute-apps=gpu_uuid,pid,used_memory,name --format=csv,noheader,nounits |"
        ' while IFS= read -r line; do say process "$line"; done\n'
    )


def put_script(nonce: str, files: Mapping[str, str]) -> str:
    """The script that writes files into a new folder of its own, and says where that is."""
    lines = ['dir=$(mktemp -d "${TMPDIR:-/tmp}/moetune-files.XXXXXX") || exit 1']
    for name, text in files.items():
        above = name.rpartition("/")[0]
        if above:
            lines.append(f'mkdir -p "$dir"/{shlex.quote(above)} || exit 1')
        lines.append(f'printf %s {shlex.quote(text)} >"$dir"/{shlex.quote(name)} || exit 1')
    return head(nonce) + "\n".join([*lines, 'say folder "$dir"', ""])


def remove_script(nonce: str, folder: str) -> str:
    """The script that removes such a folder."""
    place = shlex.quote(folder)
    return (
        head(nonce) + f"[ ! -d {place} ] || {{ [ -O {place} ] && [ ! -L {place} ] && rm -rf -- {place}; }}\n"
    )


def _variable(name: str, value: str) -> str:
    return f"export {name}={shlex.quote(value)}" if value else f"unset {name}"


def _cache(name: str) -> str:
    if not name:
        return ""
    place = '"${XDG_CACHE_HOME:-$HOME/.cache}/moetune/arms/' + name + '"'
    return f"export TRITON_CACHE_DIR={place}; (umask 077; mkdir -p {place});"
