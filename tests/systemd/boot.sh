#!/bin/bash
# Runs as the first process of new namespaces and becomes systemd there. What it mounts and writes
# is the lab's alone and goes with it: the machine's own files are below overlays.
#
# boot.sh LAB REPOSITORY PYTHON_HOME VENV: a directory outside of the overlays, the repository, and
# the interpreter's home and virtual environment, which the sandbox would not see where they are;
# then "installed", or "bare" for an environment that has everything but the package in place.
set -eu
lab=$1 repository=$2 python_home=$3 venv=$4

mount --make-rprivate /
mount -t tmpfs tmpfs "$lab/upper"
over() { # LOWER AT: AT shows LOWER, and keeps what is written to it to itself
    local name=${2//\//_}
    mkdir -p "$lab/upper/$name/up" "$lab/upper/$name/work" "$2"
    mount -t overlay overlay \
        -o "lowerdir=$1,upperdir=$lab/upper/$name/up,workdir=$lab/upper/$name/work" "$2"
}
for directory in /etc /opt /var /usr/local; do over "$directory" "$directory"; done
mount -t tmpfs -o mode=755 tmpfs /run
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
ip link set lo up

mkdir -p /opt/python
mount --bind "$python_home" /opt/python
if test "$5" = installed; then
    over "$venv" /opt/distserve/venv
else # nothing mounted there: it is to be removed
    mkdir -p /opt/distserve /opt/packages
    mount --bind -o ro "$venv" /opt/packages
    cp -Rs /opt/packages /opt/distserve/venv
    for file in pyvenv.cfg bin/distserve bin/pip; do
        cp --remove-destination "/opt/packages/$file" "/opt/distserve/venv/$file"
    done
fi
packages=$(echo /opt/distserve/venv/lib/python3*/site-packages)
ln -sf /opt/python/bin/python3 /opt/distserve/venv/bin/python3
ln -sf python3 /opt/distserve/venv/bin/python
sed -i 's#^home = .*#home = /opt/python/bin#' /opt/distserve/venv/pyvenv.cfg
sed -i "1s#^.*#\#!/opt/distserve/venv/bin/python#" /opt/distserve/venv/bin/{distserve,pip}
if test "$5" = installed; then # as pip would leave it, in a moment
    rm -f "$packages"/__editable__*
    for room in daemon gpu_workers ipc planner; do cp -Rp "$repository/$room" "$packages/"; done
    mkdir -p /opt/distserve/bin
    ln -s ../venv/bin/distserve /opt/distserve/bin/distserve
fi

# Only these units and what is put into /etc: nothing that would touch the machine. Their output is
# in a file, since there is no journal.
units=/run/lab-units
mkdir -p $units/service.d "$lab/log"
for name in sysinit basic network-online sockets multi-user shutdown; do
    printf '[Unit]\nDescription=%s\nDefaultDependencies=no\n' "$name" >"$units/$name.target"
done
printf '[Service]\nStandardOutput=append:%s\nStandardError=append:%s\n%s\n' "$lab/log/%n" \
    "$lab/log/%n" "Environment=LD_LIBRARY_PATH=/opt/python/lib" >$units/service.d/lab.conf
rm -rf /etc/systemd/system /etc/systemd/system.conf.d
mkdir -p /etc/systemd/system
printf '[Manager]\nDefaultTimeoutStopSec=10\n' >/etc/systemd/system.conf

hostname lab
exec env -i container=docker PATH=/usr/sbin:/usr/bin:/sbin:/bin \
    SYSTEMD_UNIT_PATH=/etc/systemd/system:/run/systemd/system:$units SYSTEMD_LOG_TARGET=null \
    /lib/systemd/systemd --system --unit=basic.target
