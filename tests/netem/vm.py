"""A virtual machine with sch_netem: boot a kernel in qemu and run a command in it, with the files of this machine.

    python tests/netem/vm.py -- .venv/bin/pytest tests/integration/test_shaping.py

In the guest's memory are this checkout, the Python environment without its large packages, and tools that tests start
often. All other files come from the host's root file system, read-only over 9p under a writable layer. Files in
``.build/vm/out`` (``$VM_OUT`` in the guest) are kept. The guest has one processor with 1000 million instructions per
second of its own clock, which is slower than real time on a slow or busy host. The kernel is Debian's package, unpacked
and not installed; an initramfs loads its modules. KVM is not used, since within another virtual machine it may hang.
The exit status is that of the command (1 for 3), 3 if the machine is unavailable here, or 124 after the timeout.
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

EXCLUDED = {
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
"""Large folders that are not in the guest's memory; tests of links do not need them."""
_LARGE = 10 << 20
"""Size in bytes from which a file is not in the guest's memory."""
TOOLS = ("bash", "sh", "env", "sleep", "nsenter", "ip", "tc")
"""Programs that tests in the guest start often."""

# The guest's clock counts its instructions, one nanosecond each, at whatever speed the host emulates them. If the guest
# were idle, its clock would follow the host's, and a busy host would delay its timers: so it spins instead.
_TIME = ["-smp", "1", "-icount", "shift=0,sleep=on"]


def _make_spinner() -> bytes:
    """Return an x86-64 program for spinning at the lowest priority.

    Emulating a thousand no-operations takes almost no time, so time in the guest passes faster than on the host.
    """
    base, header, no_operations = 0x400000, 120, 4096
    # sched_setscheduler(0, SCHED_IDLE, &0), where bytes 10 to 14 are the relative address of a 0 behind the loop
    idle = bytes.fromhex("31ffbe05000000488d15 00000000b8900000000f05")
    jump_size = 5
    distance = len(idle) - 14 + no_operations + jump_size
    code = idle[:10] + distance.to_bytes(4, "little") + idle[14:]
    # The jump (e9) goes back to the first no-operation (90).
    code += b"\x90" * no_operations + b"\xe9"
    code += (-no_operations - jump_size).to_bytes(4, "little", signed=True)
    code += bytes(8)
    size = header + len(code)
    # The header of an ELF executable for x86-64 (machine 62), and of its only segment, readable and executable (5).
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
    """The machine cannot boot the guest."""


def run(
    command: list[str], *, timeout: float, memory: str = "3G", echo: bool = True
) -> int:
    """Run a command in the guest, in the folder of the checkout, and return the exit status.

    Raises `VmUnavailable` if this machine cannot boot the guest.
    """
    kernel, initramfs = _prepare()
    initrd = _add_files(initramfs)
    out = BUILD / "out"
    out.mkdir(exist_ok=True)
    (out / "status").unlink(missing_ok=True)
    # Each look-up of a file on the host takes long. A short PATH and no locale save many.
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
    except subprocess.CalledProcessError as error:
        raise VmUnavailable(f"qemu ended with {error.returncode}") from error
    try:
        return int((out / "status").read_text())
    except (OSError, ValueError):
        print(
            "vm: the guest left no exit status: see its console output", file=sys.stderr
        )
        return 1


def _is_small(path: Path) -> bool:
    return path.is_dir() or path.stat().st_size < _LARGE


def _paths_in_memory() -> list[Path]:
    """Return the folders and files for the guest's memory."""
    python = [sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")]
    checkout = ("testbed", "agent", "controller", "papers", "tests", "tools")
    tools = [sys.executable, *filter(None, map(_tool, TOOLS))]
    resolved_tools = [Path(tool).resolve() for tool in tools]
    # Libraries have the names that programs request: the guest would follow a symbolic link on the host each time.
    shutil.rmtree(LIBRARIES, ignore_errors=True)
    LIBRARIES.mkdir()
    dependencies = subprocess.run(
        ["ldd", *resolved_tools], check=False, capture_output=True, text=True
    ).stdout
    for library in set(re.findall(r"(/\S+) \(0x", dependencies)):
        shutil.copy2(library, LIBRARIES)
    paths = [Path(path).resolve() for path in (*python, "/etc/ld.so.cache")]
    paths += resolved_tools
    paths += [ROOT / name for name in (*checkout, "conftest.py")]
    paths.append(LIBRARIES)
    return [path for path in dict.fromkeys(paths) if _is_small(path)]


def _add_files(initramfs: Path) -> Path:
    """Append the files of the guest's memory to an initramfs.

    While the guest waited for a file from the host, its clock would advance far.
    """
    paths = _paths_in_memory()
    # The names in order, each once; cpio needs a folder before its files.
    names: dict[str, None] = {}
    for path in paths:
        for folder in (*reversed(path.parents), path):
            names[str(folder)] = None
        for folder_name, subfolders, files in os.walk(path):
            subfolders[:] = [name for name in subfolders if name not in EXCLUDED]
            for name in ("", *files):
                names[str(Path(folder_name, name))] = None
    small = [name[1:] for name in names if len(name) > 1 and _is_small(Path(name))]
    content = _make_archive(Path("/"), "\n".join([*small, ""]).encode())
    # The init script mounts these paths over the host's.
    listed = BUILD / "listed"
    (listed / "modules").mkdir(parents=True, exist_ok=True)
    (listed / "modules/held").write_text("".join(f"{path}\n" for path in paths))
    path_list = _make_archive(listed, b"modules/held\n")
    first = initramfs.read_bytes()
    initrd = BUILD / "initrd"
    # The kernel reads archives one after the other, each at a multiple of 4 bytes.
    initrd.write_bytes(first + bytes(-len(first) % 4) + path_list + content)
    return initrd


def _make_archive(folder: Path, names: bytes) -> bytes:
    """Return a cpio archive of the files in a folder, with one name on each line of ``names``."""
    return subprocess.run(
        ["cpio", "-o", "-H", "newc", "--quiet"],
        cwd=folder,
        input=names,
        check=True,
        capture_output=True,
    ).stdout


def _prepare() -> tuple[Path, Path]:
    """Return the kernel and the initramfs, which are created on first use. Raises `VmUnavailable`."""
    try:
        return _create()
    except subprocess.CalledProcessError as error:
        command = " ".join(map(str, error.cmd))
        raise VmUnavailable(
            f"no kernel for the virtual machine: '{command}' ended with {error.returncode}"
        ) from error
    except (StopIteration, FileNotFoundError) as error:
        raise VmUnavailable(
            f"no kernel for the virtual machine: needs Debian with package lists ({error})"
        ) from error


def _create() -> tuple[Path, Path]:
    BUILD.mkdir(parents=True, exist_ok=True)
    initramfs = BUILD / "initramfs.gz"
    _install_host_packages()
    tree = BUILD / "tree"
    if not list(tree.glob("boot/vmlinuz-*")):
        _unpack(tree)
    kernel = next(tree.glob("boot/vmlinuz-*"))
    # A change of this file may change the list of modules or the init script.
    changed = Path(__file__).stat().st_mtime
    if not initramfs.exists() or initramfs.stat().st_mtime < changed:
        _pack(tree, kernel.name.removeprefix("vmlinuz-"), initramfs)
    return kernel, initramfs


def _unpack(tree: Path) -> None:
    """Download kernel and busybox and unpack both to ``tree``, all or nothing."""
    draft = tree.with_name("draft")
    shutil.rmtree(draft, ignore_errors=True)
    try:
        meta = _output("apt-cache", "depends", "linux-image-amd64")
    except subprocess.CalledProcessError:
        # This machine has no package lists yet.
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
    """Create an initramfs of busybox, the kernel modules with their dependencies, and the init script."""
    root = BUILD / "initramfs"
    shutil.rmtree(root, ignore_errors=True)
    for folder in ("bin", "modules", "proc", "sys", "dev"):
        (root / folder).mkdir(parents=True)
    shutil.copy2(tree / "bin/busybox", root / "bin/busybox")
    (root / "bin/spin").write_bytes(_make_spinner())
    (root / "bin/spin").chmod(0o755)
    base = tree / "lib/modules" / release
    dependencies = {}
    for line in (base / "modules.dep").read_text().splitlines():
        path, _, others = line.partition(":")
        dependencies[path] = others.split()
    by_name = {}
    for path in dependencies:
        by_name[Path(path).name.split(".")[0].replace("-", "_")] = path
    order: list[str] = []

    def add(path: str) -> None:
        # modules.dep lists direct dependencies first, and insmod needs the indirect ones before them.
        for dependency in reversed(dependencies[path]):
            add(dependency)
        if path not in order:
            order.append(path)

    for module in MODULES:
        # A module without a file is built into the kernel.
        if module in by_name:
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
    initramfs.write_bytes(gzip.compress(_make_archive(root, names), compresslevel=1))


def _install_host_packages() -> None:
    """Install the programs for booting the guest. Raises `VmUnavailable` unless run by root on Debian."""
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
    # Standard output is reserved for the guest.
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
    command = arguments.command
    if command[:1] == ["--"]:
        command = command[1:]
    try:
        status = run(command, timeout=arguments.timeout)
        # Status 3 is reserved for an unavailable machine.
        sys.exit(1 if status == UNAVAILABLE else status)
    except VmUnavailable as reason:
        print(f"vm: {reason}", file=sys.stderr)
        sys.exit(UNAVAILABLE)


if __name__ == "__main__":
    main()
