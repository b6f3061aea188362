"""Boots a kernel that has sch_netem in qemu and runs a command in it, on this machine's own files.

    python tests/netem/vm.py -- .venv/bin/pytest tests/integration/test_shaping.py

The guest has this checkout, the Python environment without its large packages, and the tools that tests start again
and again in its memory; of the rest it sees the host's root file system read-only over 9p with a scratch layer on top.
What it writes into ``.build/vm/out`` (``$VM_OUT`` in the guest) is kept. It has one processor, of 1000 million
instructions a second by its own clock, which a slow or busy host lets run slower than the world's. The kernel is
Debian's package, unpacked and not installed; its modules are loaded from an initramfs. KVM is not used, even where its
device exists: inside another virtual machine it may be there and yet hang. Exit status is the command's, 3 where no
such machine can be had here (where the command's is 3, it is 1), or 124 when time is up.
"""

from __future__ import annotations

import argparse
import gzip
import os
import re
import shlex
import shutil
import struct
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

UNAVAILABLE, TIMED_OUT = 3, 124
BUILD = ROOT / ".build" / "vm"
LIBRARIES = BUILD / "libraries"
HOST_PACKAGES = {
    "qemu-system-x86_64": "qemu-system-x86",
    "cpio": "cpio",
    "depmod": "kmod",
}
MODULES = [
    *("crc32c_generic", "virtio_pci", "9pnet_virtio", "9p", "overlay"),
    *("veth", "bridge", "ifb"),
    *(
        "sch_netem",
        "sch_htb",
        "sch_ingress",
        "sch_tbf",
        "sch_prio",
        "cls_u32",
        "cls_matchall",
        "act_mirred",
    ),
    *(
        "x_tables",
        "ip_tables",
        "iptable_filter",
        "iptable_mangle",
        "xt_NFQUEUE",
        "nfnetlink_queue",
        "xt_statistic",
    ),
    *("nf_tables", "nft_compat"),
]

LEFT_OUT = {
    *(
        "torch",
        "torchgen",
        "functorch",
        "scipy",
        "scipy.libs",
        "sklearn",
        "numpy",
        "numpy.libs",
        "sympy",
        "mpmath",
    ),
    *(
        "networkx",
        "matplotlib",
        "kiwisolver",
        "fontTools",
        "PIL",
        "pillow.libs",
        "mypy",
        "mypyc",
        "pip",
        "setuptools",
    ),
    *(
        "dask",
        "torchmetrics",
        "narwhals",
        "asyncssh",
        "scipy-stubs",
        "cryptography",
        "mpl_toolkits",
    ),
    *("test", "idlelib", "lib2to3", "tkinter", "ensurepip", "site-packages"),
}
"""Folders that the guest goes without: large, and of no use for links."""
_LARGE = 10 << 20
"""Bytes of a file that it goes without."""
TOOLS = ("bash", "sh", "env", "sleep", "nsenter", "ip", "tc")
"""What its tests start again and again."""

# The guest's clock counts its instructions, a nanosecond each, however slowly the host emulates them. While the guest
# idled it would go with the host's, and a busy host would make timers late: so the guest never idles, it spins.
_TIME = ["-smp", "1", "-icount", "shift=0,sleep=on"]


def _spinner() -> bytes:
    """Return a program that does nothing when there is nothing else to do.

    Emulated, a thousand no-operations cost next to nothing: spun time passes faster than the host's.
    """
    base, header, nothing = 0x400000, 120, 4096
    idle = bytes.fromhex(
        "31ffbe05000000488d15 00000000b8900000000f05"
    )  # sched_setscheduler(0, SCHED_IDLE, &0)
    code = idle[:10] + (len(idle) - 14 + nothing + 5).to_bytes(4, "little") + idle[14:]
    code += (
        b"\x90" * nothing
        + b"\xe9"
        + (-nothing - 5).to_bytes(4, "little", signed=True)
        + bytes(8)
    )
    size = header + len(code)
    elf = struct.pack(
        "<16sHHIQQQIHHHHHH",
        b"\x7fELF\2\1\1",
        2,
        62,
        1,
        base + header,
        64,
        0,
        0,
        64,
        56,
        1,
        0,
        0,
        0,
    )
    return elf + struct.pack("<IIQQQQQQ", 1, 5, 0, base, base, size, size, 4096) + code


INIT = """#!/bin/busybox sh
/bin/busybox --install -s /bin
export PATH=/bin
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs dev /dev
/bin/spin &
while read -r module; do insmod "/modules/$module" || echo "vm: no $module"; done < /modules/order
mkdir -p /host /scratch /new
mount -t 9p -o trans=virtio,version=9p2000.L,ro,cache=loose,msize=524288 host /host || echo "vm: no host files"
mount -t tmpfs scratch /scratch
mkdir -p /scratch/upper /scratch/work
mount -t overlay -o lowerdir=/host,upperdir=/scratch/upper,workdir=/scratch/work new /new
while read -r path; do mount --bind "$path" "/new$path"; done < /modules/held
for kind in proc sys dev; do mount --bind /$kind /new/$kind; done
mount -t devpts devpts /new/dev/pts 2>/dev/null
mkdir -p /new/dev/shm
mount -t tmpfs shm /new/dev/shm
mount -t tmpfs run /new/run
mount -t 9p -o trans=virtio,version=9p2000.L,rw,cache=none out /new@OUT@ || echo "vm: no place for results"
ifconfig lo 127.0.0.1 up
chroot /new /bin/bash "@OUT@/command"
echo $? > "/new@OUT@/status"
sync
poweroff -f
"""


class VmUnavailable(Exception):  # noqa: N818 - a state of this machine
    """This machine cannot boot the guest."""


def run(
    command: list[str], *, timeout: float, memory: str = "3G", echo: bool = True
) -> int:
    """Run the command in the guest, in the checkout; return its exit status. Raises `VmUnavailable`."""
    kernel, initramfs = _prepare()
    initrd = _with_files(initramfs)
    out = BUILD / "out"
    out.mkdir(exist_ok=True)
    (out / "status").unlink(missing_ok=True)
    # Neither a language nor a long PATH: each file that is looked for on the host takes the guest a while.
    exports = {
        "HOME": os.environ.get("HOME", "/root"),
        "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
        "LC_ALL": "C",
        "LD_LIBRARY_PATH": str(LIBRARIES),
        "VM_OUT": str(out),
        "TESTBED_IN_VM": "1",
        "PYTHONPATH": str(ROOT),
    }
    lines = [f"export {key}={shlex.quote(value)}" for key, value in exports.items()]
    lines += [f"cd {shlex.quote(str(ROOT))}", shlex.join(command)]
    (out / "command").write_text("\n".join(lines) + "\n")
    qemu = [
        "qemu-system-x86_64", "-m", memory, "-nographic", "-no-reboot", *_TIME,
        "-kernel", str(kernel), "-initrd", str(initrd), "-net", "none",
        "-append", "console=ttyS0 quiet panic=-1 nokaslr mitigations=off audit=0",
        "-fsdev", "local,id=host,path=/,security_model=none,readonly=on,multidevs=remap",
        "-device", "virtio-9p-pci,fsdev=host,mount_tag=host",
        "-fsdev", f"local,id=out,path={out},security_model=none",
        "-device", "virtio-9p-pci,fsdev=out,mount_tag=out",
    ]  # fmt: skip
    stdout = None if echo else subprocess.DEVNULL
    try:
        subprocess.run(
            qemu, stdin=subprocess.DEVNULL, stdout=stdout, timeout=timeout, check=True
        )
    except subprocess.TimeoutExpired:
        print(f"vm: the guest did not end within {timeout:.0f} s", file=sys.stderr)
        return TIMED_OUT
    except subprocess.CalledProcessError as failed:
        raise VmUnavailable(f"qemu ended with {failed.returncode}") from failed
    try:
        return int((out / "status").read_text())
    except (OSError, ValueError):
        print(
            "vm: the guest left no exit status: see its console output", file=sys.stderr
        )
        return 1


def _in_memory() -> list[Path]:
    """Return the folders and files that the guest has in its memory."""
    paths = [sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")]
    ours = [
        ROOT / name
        for name in (
            "testbed",
            "agent",
            "controller",
            "papers",
            "tests",
            "tools",
            "conftest.py",
        )
    ]
    tools = [
        Path(path).resolve()
        for path in (sys.executable, *filter(None, map(_tool, TOOLS)))
    ]
    # By the names that programs ask for: a link on the host has to be read from there each time that it is followed.
    shutil.rmtree(LIBRARIES, ignore_errors=True)
    LIBRARIES.mkdir()
    linked = subprocess.run(
        ["ldd", *tools], check=False, capture_output=True, text=True
    ).stdout
    for library in set(re.findall(r"(/\S+) \(0x", linked)):
        shutil.copy2(library, LIBRARIES)
    found = [
        *(Path(path).resolve() for path in (*paths, "/etc/ld.so.cache")),
        *tools,
        *ours,
        LIBRARIES,
    ]
    return [
        path
        for path in dict.fromkeys(found)
        if path.is_dir() or path.stat().st_size < _LARGE
    ]


def _with_files(initramfs: Path) -> Path:
    """Append what the guest runs to what it boots from.

    While it waited for a file from the host, its clock would run away.
    """
    held = _in_memory()
    names: dict[str, None] = {}
    for path in held:
        names |= dict.fromkeys(str(each) for each in (*reversed(path.parents), path))
        for where, inner, files in os.walk(path):
            inner[:] = [name for name in inner if name not in LEFT_OUT]
            names |= dict.fromkeys(str(Path(where, name)) for name in ("", *files))
    kept = [
        name[1:]
        for name in names
        if len(name) > 1 and (Path(name).is_dir() or Path(name).stat().st_size < _LARGE)
    ]
    packed = subprocess.run(
        ["cpio", "-o", "-H", "newc", "--quiet"],
        cwd="/",
        input="\n".join([*kept, ""]).encode(),
        check=True,
        capture_output=True,
    )
    listed = BUILD / "listed"
    (listed / "modules").mkdir(parents=True, exist_ok=True)
    (listed / "modules/held").write_text("".join(f"{path}\n" for path in held))
    list_ = subprocess.run(
        ["cpio", "-o", "-H", "newc", "--quiet"],
        cwd=listed,
        input=b"modules/held\n",
        check=True,
        capture_output=True,
    )
    first = initramfs.read_bytes()
    initrd = BUILD / "initrd"
    initrd.write_bytes(first + bytes(-len(first) % 4) + list_.stdout + packed.stdout)
    return initrd


def _prepare() -> tuple[Path, Path]:
    """Return (kernel, initramfs), made on first use. Raises `VmUnavailable`."""
    try:
        return _made()
    except subprocess.CalledProcessError as failed:
        words = " ".join(map(str, failed.cmd))
        raise VmUnavailable(
            f"no kernel for the virtual machine: '{words}' ended with {failed.returncode}"
        ) from failed
    except (StopIteration, FileNotFoundError) as missing:
        raise VmUnavailable(
            f"no kernel for the virtual machine: this is no Debian with package lists ({missing})"
        ) from missing


def _made() -> tuple[Path, Path]:
    BUILD.mkdir(parents=True, exist_ok=True)
    initramfs = BUILD / "initramfs.gz"
    _install_host_packages()
    tree = BUILD / "tree"
    if not list(tree.glob("boot/vmlinuz-*")):
        _unpack(tree)
    kernel = next(tree.glob("boot/vmlinuz-*"))
    if (
        not initramfs.exists()
        or initramfs.stat().st_mtime < Path(__file__).stat().st_mtime
    ):
        _pack(tree, kernel.name.removeprefix("vmlinuz-"), initramfs)
    return kernel, initramfs


def _unpack(tree: Path) -> None:
    """Fetch kernel and busybox and unpack them there, all or nothing."""
    draft = tree.with_name("draft")
    shutil.rmtree(draft, ignore_errors=True)
    try:
        meta = _output("apt-cache", "depends", "linux-image-amd64")
    except subprocess.CalledProcessError:  # a machine without package lists yet
        _as_root("apt-get", "update", "-qq")
        meta = _output("apt-cache", "depends", "linux-image-amd64")
    package = next(
        line.split()[1] for line in meta.splitlines() if "Depends: linux-image" in line
    )
    for name in (package, "busybox-static"):
        subprocess.run(
            ["apt-get", "download", "-qq", name],
            cwd=BUILD,
            check=True,
            stderr=subprocess.DEVNULL,
        )
        archive = sorted(BUILD.glob(f"{name}_*.deb"))[-1]
        subprocess.run(["dpkg", "-x", str(archive), str(draft)], check=True)
        archive.unlink()
    release = next((draft / "lib/modules").iterdir()).name
    subprocess.run([_tool("depmod"), "-b", str(draft), release], check=True)
    shutil.rmtree(tree, ignore_errors=True)
    draft.rename(tree)


def _pack(tree: Path, release: str, initramfs: Path) -> None:
    """Make an initramfs of busybox, the modules with what they need, and the init script."""
    root = BUILD / "initramfs"
    shutil.rmtree(root, ignore_errors=True)
    for folder in ("bin", "modules", "proc", "sys", "dev"):
        (root / folder).mkdir(parents=True)
    shutil.copy2(tree / "bin/busybox", root / "bin/busybox")
    (root / "bin/spin").write_bytes(_spinner())
    (root / "bin/spin").chmod(0o755)
    base = tree / "lib/modules" / release
    needs = {
        line.split(":")[0]: line.split(":")[1].split()
        for line in (base / "modules.dep").read_text().splitlines()
    }
    by_name = {Path(path).name.split(".")[0].replace("-", "_"): path for path in needs}
    order: list[str] = []

    def add(path: str) -> None:
        for need in reversed(needs[path]):
            add(need)
        if path not in order:
            order.append(path)

    for module in MODULES:
        if module in by_name:  # what is missing is built into the kernel
            add(by_name[module])
    for path in order:
        shutil.copy2(base / path, root / "modules" / Path(path).name)
    (root / "modules/order").write_text(
        "".join(Path(path).name + "\n" for path in order)
    )
    init = root / "init"
    init.write_text(INIT.replace("@OUT@", str(BUILD / "out")))
    init.chmod(0o755)
    names = subprocess.run(
        ["find", "."], cwd=root, check=True, capture_output=True
    ).stdout
    archive = subprocess.run(
        ["cpio", "-o", "-H", "newc", "--quiet"],
        cwd=root,
        input=names,
        check=True,
        capture_output=True,
    ).stdout
    initramfs.write_bytes(gzip.compress(archive, compresslevel=1))


def _install_host_packages() -> None:
    """Install what boots the guest, where this is a Debian machine and we are root; say what is missing otherwise."""
    missing = [package for tool, package in HOST_PACKAGES.items() if not _tool(tool)]
    if not missing:
        return
    if os.geteuid() != 0 or not shutil.which("apt-get"):
        raise VmUnavailable(
            f"install {' '.join(missing)} to run these tests in a virtual machine"
        )
    print(f"installing {' '.join(missing)} for the virtual machine", file=sys.stderr)
    _as_root("apt-get", "update", "-qq")
    _as_root("apt-get", "install", "-y", "-qq", "--no-install-recommends", *missing)


def _as_root(*command: str) -> None:
    if os.geteuid() != 0:
        raise VmUnavailable(f"be root, or run '{' '.join(command)}' as root")
    # What it says is no part of what the guest says.
    subprocess.run(
        command,
        check=True,
        stdout=sys.stderr,
        env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"},
    )


def _tool(name: str) -> str:
    return (
        shutil.which(name, path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin") or ""
    )


def _output(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description="Run a command in a virtual machine whose kernel has sch_netem."
    )
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    arguments = parser.parse_args()
    command = (
        arguments.command[1:] if arguments.command[:1] == ["--"] else arguments.command
    )
    try:
        status = run(command, timeout=arguments.timeout)
        sys.exit(1 if status == UNAVAILABLE else status)
    except VmUnavailable as reason:
        print(f"vm: {reason}", file=sys.stderr)
        sys.exit(UNAVAILABLE)


if __name__ == "__main__":
    main()
