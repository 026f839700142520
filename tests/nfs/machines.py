"""Emulated machines with Debian's kernel: one NFS server, and clients with this machine's programs.

The packages are downloaded and unpacked, not installed. Clients read this machine's files by 9p."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import socket
import subprocess
import threading
import time
from concurrent.futures import Executor, Future
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.waiting import wait_until

REPOSITORY = Path(__file__).resolve().parents[2]
DOWNLOADS = REPOSITORY / "build" / "nfs"
SERVER, MOUNTED = "10.0.77.1", "/mnt"
LEASE_SECONDS = 10
PATH = f"{os.environ['PATH']}:/usr/sbin:/sbin"
PROGRAMS = ("qemu-system-x86_64", "setpriv", "apt-get", "dpkg", "depmod", "mkfs.ext4")
_START_SECONDS = 300.0
_MODULES = (
    "virtio_pci",
    "virtio_net",
    "virtio_blk",
    "virtio_console",
    "9pnet_virtio",
    "9p",
    "crc32c_generic",
    "ext4",
    "md5",
    "nfsd",
    "nfsv4",
)
_GROUP = "230.77.0.1"

_COMMON = """#!/bin/busybox sh
/bin/busybox mkdir -p /proc /sys /dev /etc /host /disk /run /var/lib/nfs
/bin/busybox --install -s /bin
mount -t proc proc /proc; mount -t sysfs sys /sys; mount -t devtmpfs dev /dev
modprobe -a MODULES
ip link set lo up; ip link set eth0 up
"""
# The kernel asks user space for clients and exports. Answers that never expire are given before.
_SERVER = (
    _COMMON
    + f"""
ip addr add {SERVER}/24 dev eth0
mount -t ext4 /dev/vda /disk || exec poweroff -f
mkdir -p /disk/export /disk/clients /proc/fs/nfsd
mount -t nfsd nfsd /proc/fs/nfsd
echo /disk/clients > /proc/fs/nfsd/nfsv4recoverydir
echo {LEASE_SECONDS} > /proc/fs/nfsd/nfsv4leasetime
echo {LEASE_SECONDS} > /proc/fs/nfsd/nfsv4gracetime
for n in 2 3; do
  echo "nfsd 10.0.77.$n 2147483647 clients" > /proc/net/rpc/auth.unix.ip/channel
done
echo "clients /disk/export 2147483647 9218 65534 65534 0" > /proc/net/rpc/nfsd.export/channel
echo 'clients 1 \\x00000000 2147483647 /disk/export' > /proc/net/rpc/nfsd.fh/channel
echo "-2 -3 +4 +4.1 +4.2" > /proc/fs/nfsd/versions
echo "tcp 2049" > /proc/fs/nfsd/portlist
echo 8 > /proc/fs/nfsd/threads
echo SERVES; exec sleep 1000000
"""
)
_CLIENT = (
    _COMMON
    + f"""
ip addr add ADDRESS/24 dev eth0
mount -t 9p -o trans=virtio,version=9p2000.L,ro,cache=loose,msize=512000 host /host
for each in proc sys dev; do mount -o bind /$each /host/$each; done
mount -t tmpfs tmp /host/tmp; mount -t tmpfs run /host/run
mkdir /host/tmp/out
mount -t 9p -o trans=virtio,version=9p2000.L,msize=512000 out /host/tmp/out
OPTIONS=vers=4.2,addr={SERVER},clientaddr=ADDRESS
chroot /host /bin/mount -i -t nfs4 -o $OPTIONS {SERVER}:/ {MOUNTED} || exec poweroff -f
cd /host; HOME=/tmp PYTHONDONTWRITEBYTECODE=1 exec chroot /host /bin/sh -c 'cd {REPOSITORY} \\
  && exec .venv/bin/python -m tests.nfs.client NAME /dev/vport*p1 {MOUNTED} /tmp/out/NAME.jsonl'
"""
)


# --- The kernel and the first files ---------------------------------------------------------------


@dataclass(frozen=True)
class Kernel:
    image: Path
    root: Path
    """The unpacked packages."""

    @property
    def version(self) -> str:
        return self.image.name.removeprefix("vmlinuz-")


def get_kernel() -> Kernel:
    """Download Debian's kernel and busybox, unless they are there."""
    root = DOWNLOADS / "root"
    if not list(root.glob("boot/vmlinuz-*")):
        root.mkdir(parents=True, exist_ok=True)
        depends = _output("apt-cache", "depends", "linux-image-amd64")
        (kernel,) = [line.split()[-1] for line in depends.splitlines() if "Depends:" in line]
        _output("apt-get", "download", kernel, "busybox-static", cwd=DOWNLOADS)
        for package in DOWNLOADS.glob("*.deb"):
            _output("dpkg", "--extract", str(package), str(root))
            package.unlink()
    (image,) = root.glob("boot/vmlinuz-*")
    kernel = Kernel(image, root)
    _output("depmod", "--basedir", str(root), kernel.version)
    return kernel


def write_first_files(kernel: Kernel, folder: Path, init: str) -> Path:
    """Write an initramfs with busybox, the kernel's modules and `init`."""
    first = folder / "first"
    shutil.rmtree(first, ignore_errors=True)
    modules = Path("lib/modules") / kernel.version
    (first / modules).mkdir(parents=True)
    (first / "bin").mkdir()
    shutil.copy(kernel.root / "bin/busybox", first / "bin")
    for each in (kernel.root / modules).glob("modules.*"):
        shutil.copy(each, first / modules)
    for each in _with_dependencies(kernel.root / modules):
        (first / modules / each).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(kernel.root / modules / each, first / modules / each)
    (first / "init").write_text(init.replace("MODULES", " ".join(_MODULES)))
    (first / "init").chmod(0o755)
    names = "\n".join(str(path.relative_to(first)) for path in sorted(first.rglob("*")))
    busybox = str(kernel.root / "bin/busybox")
    packed = subprocess.run(
        [busybox, "cpio", "-o", "-H", "newc"],
        cwd=first,
        input=names.encode(),
        capture_output=True,
        check=True,
        timeout=120,
    ).stdout
    file = folder / "first.gz"
    file.write_bytes(gzip.compress(packed, 1))
    shutil.rmtree(first)
    return file


def qemu_version() -> str:
    return _output("qemu-system-x86_64", "--version").splitlines()[0]


def _with_dependencies(modules: Path) -> set[str]:
    needs: dict[str, list[str]] = {}
    for line in (modules / "modules.dep").read_text().splitlines():
        file, _, others = line.partition(":")
        needs[Path(file).name.partition(".")[0].replace("-", "_")] = [file, *others.split()]
    return {file for name in _MODULES for file in needs.get(name, ())}


def _output(*command: str, cwd: Path | None = None) -> str:
    environment = {**os.environ, "PATH": PATH}
    done = subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=600
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed: {done.stderr[-1000:]}")
    return done.stdout


# --- Machines -------------------------------------------------------------------------------------


@dataclass(eq=False)
class Machine:
    """A process of qemu. `kill` is a power failure: only synced writes are on its disk.

    The machine also ends with the thread of `starter`, and so with this process."""

    kernel: Kernel
    folder: Path
    name: str
    port: int
    starter: Executor
    process: subprocess.Popen | None = None

    @property
    def console(self) -> Path:
        return self.folder / f"{self.name}.log"

    def boot(self, first: Path, *options: str, megabytes: int) -> None:
        last = f"52:54:00:77:00:{['server', 'trainer', 'sampler'].index(self.name) + 1:02x}"
        command = [
            *("setpriv", "--pdeathsig", "KILL", "--"),
            *("qemu-system-x86_64", "-accel", "tcg", "-cpu", "max", "-m", str(megabytes)),
            *("-display", "none", "-monitor", "none", "-no-reboot", "-nodefaults"),
            *("-kernel", str(self.kernel.image), "-initrd", str(first)),
            *("-append", "console=ttyS0 quiet panic=-1"),
            *("-chardev", f"file,id=console,path={self.console},append=on"),
            *("-serial", "chardev:console"),
            *("-netdev", f"socket,id=net,mcast={_GROUP}:{self.port},localaddr=127.0.0.1"),
            *("-device", f"virtio-net-pci,netdev=net,mac={last}"),
            *options,
        ]
        with self.console.open("a") as console:
            self.process = self.starter.submit(
                subprocess.Popen, command, stdout=subprocess.DEVNULL, stderr=console
            ).result(timeout=60)

    def kill(self) -> None:
        process, self.process = self.process, None
        if process is not None:
            process.kill()
            process.wait(timeout=60)

    def check(self) -> None:
        if self.process is None or self.process.poll() is not None:
            text = self.console.read_text(errors="replace")[-2000:]
            raise RuntimeError(f"the machine {self.name} has ended:\n{text}")


class Server(Machine):
    def make_disk(self, *, gigabytes: int) -> None:
        self._first = write_first_files(self.kernel, self.folder, _SERVER)
        self._first = self._first.rename(self.folder / "server.gz")
        with (disk := self.folder / "server.img").open("xb") as file:
            file.truncate(gigabytes * 2**30)
        _output("mkfs.ext4", "-q", str(disk))

    def start(self) -> None:
        served = self._serves()
        disk = f"file={self.folder / 'server.img'},if=virtio,format=raw,cache=writeback"
        self.boot(self._first, "-drive", disk, megabytes=512)
        wait_until(
            lambda: self.check() or self._serves() > served,
            what="the server serves",
            timeout=_START_SECONDS,
        )

    def _serves(self) -> int:
        return self.console.read_bytes().count(b"SERVES") if self.console.exists() else 0


@dataclass(eq=False)
class Client(Machine):
    """Calls travel through a virtual serial port, one JSON object a line."""

    offset: float = 0.0
    """Seconds from this machine's clock to the clock of `time.monotonic()` here."""
    _waiting: dict[int, Future] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _socket: socket.socket | None = None

    def start(self, address: str) -> None:
        init = _CLIENT.replace("ADDRESS", address).replace("NAME", self.name)
        first = write_first_files(self.kernel, self.folder, init)
        first = first.rename(self.folder / f"{self.name}.gz")
        calls, out = self.folder / f"{self.name}.sock", self.folder / "out"
        out.mkdir(exist_ok=True)
        share = "local,security_model=none"
        self.boot(
            first,
            *("-virtfs", f"{share},id=host,path=/,mount_tag=host,readonly=on,multidevs=remap"),
            *("-virtfs", f"{share},id=out,path={out},mount_tag=out"),
            *("-device", "virtio-serial", "-device", "virtserialport,chardev=calls"),
            *("-chardev", f"socket,id=calls,path={calls},server=on,wait=off"),
            megabytes=2048,
        )
        wait_until(lambda: self.check() or calls.exists(), what="a socket", timeout=60)
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(str(calls))
        threading.Thread(target=self._read, daemon=True).start()

    def call(self, name: str, /, *, seconds: float = 600.0, **arguments) -> object:
        return self.begin(name, **arguments).result(timeout=seconds)

    def begin(self, name: str, /, **arguments) -> Future:
        with self._lock:
            number = len(self._waiting)
            future = self._waiting[number] = Future()
            line = json.dumps({"number": number, "call": name, "arguments": arguments})
            self._socket.sendall(f"{line}\n".encode())
        return future

    def wait_ready(self) -> None:
        wait_until(
            lambda: self.check() or b"CALLS" in self.console.read_bytes(),
            what=f"{self.name} answers",
            timeout=_START_SECONDS,
        )

    def measure_clock(self) -> float:
        """Return half of the quickest answer's seconds, the error of `offset`."""
        quickest = float("inf")
        for _ in range(20):
            began = time.monotonic()
            theirs = self.call("clock")
            took = time.monotonic() - began
            if took < quickest:
                quickest, self.offset = took, began + took / 2 - theirs
        return quickest / 2

    def _read(self) -> None:
        with suppress(OSError), self._socket.makefile() as lines:
            for line in lines:
                answer = json.loads(line)
                future = self._waiting[answer["number"]]
                if "error" in answer:
                    future.set_exception(RuntimeError(f"{self.name}: {answer['error']}"))
                else:
                    future.set_result(answer["value"])
