"""A federation on this machine: TLS, node keys, four SuperNodes, one of which is killed.

    python examples/flower/deploy/run.py            # about two minutes; everything is on loopback

It makes a certificate authority and keys, starts a SuperLink and four SuperNodes, and lets an
unregistered node try to get in. Then it runs five rounds of the app in the folder above with
clients chosen by FedCor, kills a node after the second, and checks that the run still finishes.
What it started, it ends, by process id.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import hashlib
import ipaddress
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

APP = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
NODES = 4
SILENT = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}


def private_key(path: Path) -> ec.EllipticCurvePrivateKey:
    key = ec.generate_private_key(ec.SECP384R1())
    path.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.OpenSSH,
            serialization.NoEncryption(),
        )
    )
    path.chmod(0o600)
    return key


def node_key(path: Path) -> Path:
    """As `ssh-keygen -t ecdsa -b 384`: the private key, and beside it the public one."""
    public = private_key(path).public_key()
    public_path = path.with_suffix(".pub")
    public_path.write_bytes(
        public.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    )
    return public_path


def fedcors_name(public: Path) -> str:
    """What fedcor calls the client with this key, when it knows clients by key."""
    key = serialization.load_ssh_public_key(public.read_bytes())
    pem = key.public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    return f"key-{hashlib.sha256(pem).hexdigest()[:32]}"


def certificates(folder: Path) -> None:
    """ca.crt, and server.crt with server.key for 127.0.0.1 and localhost, signed by it."""
    now = datetime.datetime.now(datetime.UTC)
    names = {
        who: x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, who)])
        for who in ("fedcor CA", "localhost")
    }
    keys = {who: ec.generate_private_key(ec.SECP384R1()) for who in names}
    for who, file in (("fedcor CA", "ca"), ("localhost", "server")):
        builder = (
            x509.CertificateBuilder()
            .subject_name(names[who])
            .issuer_name(names["fedcor CA"])
            .public_key(keys[who].public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(minutes=5))
            .not_valid_after(now + datetime.timedelta(days=2))
            .add_extension(x509.BasicConstraints(ca=file == "ca", path_length=None), critical=True)
        )
        if file == "server":
            here = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
            builder = builder.add_extension(x509.SubjectAlternativeName(here), critical=False)
        certificate = builder.sign(keys["fedcor CA"], hashes.SHA256())
        (folder / f"{file}.crt").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    pem = keys["localhost"].private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    (folder / "server.key").write_bytes(pem)
    (folder / "server.key").chmod(0o600)


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def descendants(pid: int) -> list[int]:
    """The processes that `pid` started, and those that they started."""
    listing = subprocess.run(
        ["ps", "-eo", "pid=,ppid="], capture_output=True, text=True, check=True
    ).stdout
    parent = {
        int(child): int(above) for child, above in (line.split() for line in listing.splitlines())
    }
    found = [pid]
    for one in found:
        found += [child for child, above in parent.items() if above == one]
    return found[1:]


def orphans(folder: Path) -> list[int]:
    """Processes whose parents are gone; they have our folder in their environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if f"FLWR_HOME={folder}/flwr".encode() in path.read_bytes():
                found.append(int(path.parent.name))
    return found


class Federation:
    """Everything that was started, so that it can be ended."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {
            **os.environ,
            **SILENT,
            "FLWR_HOME": str(folder / "flwr"),
            "PATH": f"{BIN}:{os.environ['PATH']}",
        }
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, *command: str) -> None:
        print(f"start {name}", flush=True)
        log = (self.folder / f"{name}.log").open("wb")
        self.processes[name] = subprocess.Popen(
            [str(BIN / command[0]), *command[1:]],
            stdout=log,
            stderr=subprocess.STDOUT,
            env=self.environment,
            # An interrupt reaches this script only, which then ends them all.
            start_new_session=True,
        )

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def wait_for(self, name: str, words: str, seconds: float = 90) -> None:
        end = time.monotonic() + seconds
        while words not in self.log(name):
            if time.monotonic() > end or self.processes[name].poll() is not None:
                raise SystemExit(
                    f"{name} did not say {words!r}; its log:\n{self.log(name)[-3000:]}"
                )
            time.sleep(0.3)

    def kill(self, name: str) -> None:
        process = self.processes.pop(name)
        for pid in [process.pid, *descendants(process.pid)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()

    def flwr(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(BIN / "flwr"), *arguments],
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
        )

    def end(self) -> None:
        for name in list(self.processes):
            self.kill(name)
        for pid in orphans(self.folder):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def rounds(folder: Path) -> list[dict[str, object]]:
    try:
        lines = (folder / "run" / "rounds.jsonl").read_text().splitlines()
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in lines[1:]]


def supernode(
    federation: Federation, name: str, key: Path, port: int, link: int, partition: int
) -> None:
    federation.start(
        name,
        "flower-supernode",
        "--superlink", f"127.0.0.1:{link}",
        "--root-certificates", str(federation.folder / "ca.crt"),
        "--auth-supernode-private-key", str(key),
        "--host", "127.0.0.1",
        "--port", str(port),
        "--node-config", f"partition-id={partition} num-partitions={NODES}",
    )  # fmt: skip


def deploy(folder: Path, total: int, federation: Federation) -> None:
    certificates(folder)
    link, *ports = free_ports(NODES + 2)
    (folder / "flwr").mkdir()
    settings = f'address = "127.0.0.1:{link}"\nroot-certificates = "{folder / "ca.crt"}"\n'
    (folder / "flwr" / "config.toml").write_text(
        f'[superlink]\ndefault = "deploy"\n\n[superlink.deploy]\n{settings}'
    )
    federation.start(
        "superlink",
        "flower-superlink",
        "--ssl-ca-certfile", str(folder / "ca.crt"),
        "--ssl-certfile", str(folder / "server.crt"),
        "--ssl-keyfile", str(folder / "server.key"),
        "--enable-supernode-auth",
        "--host", "127.0.0.1",
        "--port", str(link),
        "--database", str(folder / "state.db"),
        "--disable-runtime-dependency-installation",
    )  # fmt: skip
    federation.wait_for("superlink", "Uvicorn running on https")

    for node in range(NODES):
        done = federation.flwr(
            "supernode", "register", str(node_key(folder / f"node-{node}")), "deploy"
        )
        if done.returncode:
            raise SystemExit(
                f"the key of node {node} was not registered:\n{done.stdout}{done.stderr}"
            )
        supernode(federation, f"node-{node}", folder / f"node-{node}", ports[node], link, node)

    node_key(folder / "unregistered")
    supernode(federation, "unregistered", folder / "unregistered", ports[NODES], link, 0)
    refused = federation.processes["unregistered"].wait(timeout=120)
    if refused == 0 or "Failed to activate SuperNode" not in federation.log("unregistered"):
        raise SystemExit(
            f"the unregistered node was not refused:\n{federation.log('unregistered')}"
        )
    print("the unregistered node was refused: Failed to activate SuperNode", flush=True)

    own = f"identity='key' checkpoint='{folder / 'run'}'"
    run_config = f"rounds={total} warmup=2 interval=2 clients-per-round=2 timeout=90.0 {own}"
    federation.start(
        "run", "flwr", "run", str(APP), "deploy", "--stream", "--run-config", run_config
    )
    seen = 0
    end = time.monotonic() + 900
    while seen < total:
        time.sleep(0.5)
        for entry in rounds(folder)[seen:]:
            seen += 1
            keys = ("round", "selected", "participated", "probed", "faults")
            shown = json.dumps({key: entry[key] for key in keys})
            print(f"{shown}  accuracy {entry['test_accuracy']:.3f}", flush=True)
            if seen == 2:
                print("kill -9 node-3", flush=True)
                federation.kill("node-3")
        if time.monotonic() > end or (
            federation.processes["run"].poll() is not None and len(rounds(folder)) < total
        ):
            raise SystemExit(
                f"the run ended after {seen} rounds; its log:\n{federation.log('run')[-6000:]}"
            )
    done = rounds(folder)
    names = [
        line.split("\t")[1] for line in (folder / "run" / "clients.tsv").read_text().splitlines()
    ]
    dead = names.index(fedcors_name(folder / "node-3.pub"))
    late = [entry for entry in done[2:] if dead in entry["participated"]]  # type: ignore[operator]
    if late or not all(entry["participated"] for entry in done):
        raise SystemExit(f"a dead node took part, or a round had nobody: {done}")
    print(f"{len(done)} rounds; node-3 died after the second, and the others finished", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rounds", type=int, default=5, help="default: 5; the node dies after the second"
    )
    parser.add_argument(
        "--keep", action="store_true", help="keep the folder with the logs, the keys and the record"
    )
    options = parser.parse_args()
    with contextlib.ExitStack() as stack:
        if options.keep:
            folder = Path(tempfile.mkdtemp(prefix="fedcor-deploy-"))
            print(f"everything is in {folder}", flush=True)
        else:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fedcor-deploy-")))
        federation = Federation(folder)
        stack.callback(federation.end)
        deploy(folder, max(3, options.rounds), federation)


if __name__ == "__main__":
    main()
