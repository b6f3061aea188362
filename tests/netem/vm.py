"""Boots a kernel that has sch_netem in qemu and runs a command in it, on this machine's own files.

    python tests/netem/vm.py -- .venv/bin/pytest tests/integration/test_shaping.py

The guest sees the host's root file system read-only over 9p with a scratch layer on top, so the command finds the
same Python environment and the same checkout; what it writes into ``.build/vm/out`` (``$VM_OUT`` in the guest) is
kept. It has one processor, of 1000 million instructions a second by its own clock, which a slow or busy host lets run
slower than the world's. The kernel is Debian's package, unpacked and not installed; its modules are loaded from an
initramfs. KVM is not used, even where its device exists: inside another virtual machine it may be there and yet hang.
Exit status is the command's, or 3 where no such machine can be had here.
"""

from __future__ import annotations

import argparse
import gzip
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / ".build" / "vm"
HOST_PACKAGES = {"qemu-system-x86_64": "qemu-system-x86", "cpio": "cpio", "depmod": "kmod"}
MODULES = [
    *("crc32c_generic", "virtio_pci", "9pnet_virtio", "9p", "overlay"),
    *("veth", "bridge", "ifb"),
    *("sch_netem", "sch_htb", "sch_ingress", "sch_tbf", "sch_prio", "cls_u32", "cls_matchall", "act_mirred"),
    *("x_tables", "ip_tables", "iptable_filter", "iptable_mangle", "xt_NFQUEUE", "nfnetlink_queue", "xt_statistic"),
    *("nf_tables", "nft_compat"),
]

# The guest's clock counts its instructions, a nanosecond each, and goes with the host's while it idles: so the guest
# always has had the time that it believes to have had, however slowly the host emulates it.
_TIME = ["-smp", "1", "-icount", "shift=0,sleep=on"]

INIT = """#!/bin/busybox sh
/bin/busybox --install -s /bin
export PATH=/bin
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs dev /dev
while read -r module; do insmod "/modules/$module" || echo "vm: no $module"; done < /modules/order
mkdir -p /host /scratch /root
mount -t 9p -o trans=virtio,version=9p2000.L,ro,cache=loose,msize=524288 host /host || echo "vm: no host files"
mount -t tmpfs scratch /scratch
mkdir -p /scratch/upper /scratch/work
mount -t overlay -o lowerdir=/host,upperdir=/scratch/upper,workdir=/scratch/work root /root
for kind in proc sys dev; do mount --bind /$kind /root/$kind; done
mount -t devpts devpts /root/dev/pts 2>/dev/null
mkdir -p /root/dev/shm
mount -t tmpfs shm /root/dev/shm
mount -t tmpfs tmp /root/tmp
mount -t tmpfs run /root/run
mount -t 9p -o trans=virtio,version=9p2000.L,rw,cache=none out /root@OUT@ || echo "vm: no place for results"
ifconfig lo 127.0.0.1 up
chroot /root /bin/bash "@OUT@/command"
echo $? > "/root@OUT@/status"
sync
poweroff -f
"""


class VmUnavailable(Exception):  # noqa: N818 - a state of this machine
    """This machine cannot boot the guest."""


def run(command: list[str], *, timeout: float, memory: str = "3G", echo: bool = True) -> int:
    """Run the command in the guest, in the checkout; return its exit status. Raises `VmUnavailable`."""
    kernel, initramfs = _prepare()
    out = BUILD / "out"
    out.mkdir(exist_ok=True)
    (out / "status").unlink(missing_ok=True)
    keep = {key: os.environ[key] for key in ("HOME", "LANG") if key in os.environ}
    exports = {**keep, "PATH": os.environ["PATH"], "VM_OUT": str(out), "TESTBED_IN_VM": "1"}
    lines = [f"export {key}={shlex.quote(value)}" for key, value in exports.items()]
    lines += [f"cd {shlex.quote(str(ROOT))}", shlex.join(command)]
    (out / "command").write_text("\n".join(lines) + "\n")
    qemu = [
        "qemu-system-x86_64", "-m", memory, "-nographic", "-no-reboot", *_TIME,
        "-kernel", str(kernel), "-initrd", str(initramfs), "-net", "none",
        "-append", "console=ttyS0 quiet panic=-1 nokaslr mitigations=off audit=0",
        "-fsdev", "local,id=host,path=/,security_model=none,readonly=on,multidevs=remap",
        "-device", "virtio-9p-pci,fsdev=host,mount_tag=host",
        "-fsdev", f"local,id=out,path={out},security_model=none",
        "-device", "virtio-9p-pci,fsdev=out,mount_tag=out",
    ]  # fmt: skip
    stdout = None if echo else subprocess.DEVNULL
    try:
        subprocess.run(qemu, stdin=subprocess.DEVNULL, stdout=stdout, timeout=timeout, check=True)
    except subprocess.TimeoutExpired as late:
        raise VmUnavailable(f"the guest did not end within {timeout:.0f} s") from late
    except subprocess.CalledProcessError as failed:
        raise VmUnavailable(f"qemu ended with {failed.returncode}") from failed
    try:
        return int((out / "status").read_text())
    except (OSError, ValueError) as missing:
        raise VmUnavailable("the guest left no exit status: see its console output") from missing


def _prepare() -> tuple[Path, Path]:
    """Return (kernel, initramfs), made on first use."""
    BUILD.mkdir(parents=True, exist_ok=True)
    initramfs = BUILD / "initramfs.gz"
    found = sorted(BUILD.glob("tree/boot/vmlinuz-*"))
    if found and initramfs.exists() and initramfs.stat().st_mtime > Path(__file__).stat().st_mtime:
        _install_host_packages()
        return found[0], initramfs
    _install_host_packages()
    tree = BUILD / "tree"
    shutil.rmtree(tree, ignore_errors=True)
    meta = _output("apt-cache", "depends", "linux-image-amd64")
    package = next(line.split()[1] for line in meta.splitlines() if "Depends: linux-image" in line)
    for name in (package, "busybox-static"):
        subprocess.run(["apt-get", "download", "-qq", name], cwd=BUILD, check=True, stderr=subprocess.DEVNULL)
        archive = sorted(BUILD.glob(f"{name}_*.deb"))[-1]
        subprocess.run(["dpkg", "-x", str(archive), str(tree)], check=True)
        archive.unlink()
    release = next((tree / "lib/modules").iterdir()).name
    subprocess.run([_tool("depmod"), "-b", str(tree), release], check=True)
    _pack(tree, release, initramfs)
    return next((tree / "boot").glob("vmlinuz-*")), initramfs


def _pack(tree: Path, release: str, initramfs: Path) -> None:
    """Make an initramfs of busybox, the modules with what they need, and the init script."""
    root = BUILD / "initramfs"
    shutil.rmtree(root, ignore_errors=True)
    for folder in ("bin", "modules", "proc", "sys", "dev"):
        (root / folder).mkdir(parents=True)
    shutil.copy2(tree / "bin/busybox", root / "bin/busybox")
    base = tree / "lib/modules" / release
    needs = {line.split(":")[0]: line.split(":")[1].split() for line in (base / "modules.dep").read_text().splitlines()}
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
    (root / "modules/order").write_text("".join(Path(path).name + "\n" for path in order))
    init = root / "init"
    init.write_text(INIT.replace("@OUT@", str(BUILD / "out")))
    init.chmod(0o755)
    names = subprocess.run(["find", "."], cwd=root, check=True, capture_output=True).stdout
    archive = subprocess.run(
        ["cpio", "-o", "-H", "newc", "--quiet"], cwd=root, input=names, check=True, capture_output=True
    ).stdout
    initramfs.write_bytes(gzip.compress(archive, compresslevel=1))


def _install_host_packages() -> None:
    """Install what boots the guest, where this is a Debian machine and we are root; say what is missing otherwise."""
    missing = [package for tool, package in HOST_PACKAGES.items() if not _tool(tool)]
    if not missing:
        return
    if os.geteuid() != 0 or not shutil.which("apt-get"):
        raise VmUnavailable(f"install {' '.join(missing)} to run these tests in a virtual machine")
    print(f"installing {' '.join(missing)} for the virtual machine", file=sys.stderr)
    subprocess.run(["apt-get", "update", "-qq"], check=True)
    subprocess.run(["apt-get", "install", "-y", "-qq", "--no-install-recommends", *missing], check=True)


def _tool(name: str) -> str:
    return shutil.which(name, path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin") or ""


def _output(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Run a command in a virtual machine whose kernel has sch_netem.")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    arguments = parser.parse_args()
    command = arguments.command[1:] if arguments.command[:1] == ["--"] else arguments.command
    try:
        sys.exit(run(command, timeout=arguments.timeout))
    except VmUnavailable as reason:
        print(f"vm: {reason}", file=sys.stderr)
        sys.exit(3)


if __name__ == "__main__":
    main()
