#!/bin/sh
# Puts distserved on this machine as a service, or takes it off again. Called by `make install` and
# `make uninstall`, which make the virtual environment before and say where all of it goes.
#
# PREFIX   the program, in a virtual environment of its own (/opt/distserve)
# DESTDIR  all files go below it and nothing is run: for those who make packages
# PURGE=1  uninstall takes the configuration, the models and the user along
set -eu
umask 022

PREFIX=${PREFIX:-/opt/distserve}
DESTDIR=${DESTDIR:-}
SYSCONFDIR=${SYSCONFDIR:-/etc}
UNITDIR=${UNITDIR:-$SYSCONFDIR/systemd/system}
STATEDIR=/var/lib/distserved
CACHEDIR=/var/cache/distserved

SOURCE=$(cd "$(dirname "$0")/.." && pwd)
PROGRAM=$DESTDIR$PREFIX
VENV=$PROGRAM/venv
CONFIG=$DESTDIR/etc/distserve
UNITS=$DESTDIR$UNITDIR
FRAGMENTS=$DESTDIR$SYSCONFDIR
DROP_IN=10-systemd-254.conf

say() { echo "==> $*"; }
fail() { echo "$*" >&2; exit 1; }

# The service sees neither homes nor /tmp, so its interpreter cannot be there.
check_interpreter() {
    test -n "$1" || fail "Python 3.11 or newer is needed: make install PYTHON=/path/to/python3"
    real=$("$1" -c 'import os, sys; print(os.path.realpath(sys._base_executable))')
    case $real in
        /root/* | /home/* | /run/user/* | /tmp/* | /var/tmp/*)
            fail "$real cannot be the service's Python: the unit hides that directory from it." \
                "Say which: make install PYTHON=/usr/bin/python3" ;;
    esac
}

check_prefix() {
    case $PREFIX in
        /root/* | /home/* | /run/user/* | /tmp/* | /var/tmp/*)
            fail "$PREFIX cannot be the service's place: the unit hides that directory from it." ;;
        /*) ;;
        *) fail "PREFIX=$PREFIX: it must be an absolute path." ;;
    esac
    case $PREFIX in
        *[!A-Za-z0-9/._-]*) fail "PREFIX=$PREFIX: only letters, digits and / . _ - can be in it." ;;
    esac
}

is_running_systemd() { test -z "$DESTDIR" && test -d /run/systemd/system; }

# The package without what else lies around in a clone; then scripts name where they will be.
install_program() {
    check_interpreter "$VENV/bin/python"
    build=$(mktemp -d)
    trap 'rm -rf "$build"' EXIT
    for part in pyproject.toml README.md LICENSE daemon gpu_workers ipc planner; do
        cp -R "$SOURCE/$part" "$build/"
    done
    "$VENV/bin/python" -m pip --disable-pip-version-check install --quiet \
        -c "$SOURCE/constraints.txt" setuptools
    "$VENV/bin/python" -m pip --disable-pip-version-check install --quiet \
        -c "$SOURCE/constraints.txt" --no-build-isolation "$build[setup]"
    if test -n "$DESTDIR"; then
        grep -rlIF "$VENV" "$VENV/bin" "$VENV/pyvenv.cfg" | xargs -r sed -i "s#$VENV#$PREFIX/venv#g"
    fi
    mkdir -p "$PROGRAM/bin" "$PROGRAM/share"
    ln -sfn ../venv/bin/distserve "$PROGRAM/bin/distserve"
    install -m 0644 "$SOURCE/systemd/README.md" "$SOURCE/systemd/node.toml" "$SOURCE/LICENSE" \
        "$PROGRAM/share/"
}

# The operator's file is never touched: what is new comes beside it.
install_config() {
    mkdir -p "$CONFIG"
    if test ! -e "$CONFIG/node.toml"; then
        install -m 0644 "$SOURCE/systemd/node.toml" "$CONFIG/node.toml"
    elif cmp -s "$SOURCE/systemd/node.toml" "$CONFIG/node.toml"; then
        rm -f "$CONFIG/node.toml.dist"
    else
        install -m 0644 "$SOURCE/systemd/node.toml" "$CONFIG/node.toml.dist"
        say "Kept $CONFIG/node.toml as it is; the shipped one is beside it as node.toml.dist"
    fi
}

install_units() {
    mkdir -p "$UNITS" "$FRAGMENTS/sysusers.d" "$FRAGMENTS/tmpfiles.d"
    for unit in distserved.service distserved@.service distserved.socket; do
        sed "s#/opt/distserve/#$PREFIX/#g" "$SOURCE/systemd/$unit" >"$UNITS/$unit"
        chmod 0644 "$UNITS/$unit"
    done
    install -m 0644 "$SOURCE/systemd/sysusers.conf" "$FRAGMENTS/sysusers.d/distserved.conf"
    install -m 0644 "$SOURCE/systemd/tmpfiles.conf" "$FRAGMENTS/tmpfiles.d/distserved.conf"
    for unit in distserved.service distserved@.service; do
        rm -f "$UNITS/$unit.d/$DROP_IN"
        if test "$(systemd_version)" -ge 254; then
            mkdir -p "$UNITS/$unit.d"
            install -m 0644 "$SOURCE/systemd/drop-in/$DROP_IN" "$UNITS/$unit.d/$DROP_IN"
        fi
    done
}

systemd_version() {
    found=${SYSTEMD_VERSION:-$(systemctl --version 2>/dev/null | sed -n 's/^systemd \([0-9]*\).*/\1/p')}
    echo "${found:-0}"
}

make_user_and_directories() {
    if command -v systemd-sysusers >/dev/null; then
        systemd-sysusers "$SYSCONFDIR/sysusers.d/distserved.conf"
    elif ! id distserve >/dev/null 2>&1; then
        useradd --system --home-dir "$STATEDIR" --shell /usr/sbin/nologin distserve
    fi
    install -d -m 0750 -o distserve -g distserve "$STATEDIR"
    install -d -m 0755 "$STATEDIR/models"
}

install_files() {
    install_config
    install_units
    test -n "$DESTDIR" || make_user_and_directories
    ! is_running_systemd || systemctl daemon-reload
}

do_install() {
    check_prefix
    say "Installing distserved into $PROGRAM"
    install_program
    install_files
    say "Done. Next, as root:"
    echo "  $PREFIX/bin/distserve models fetch smollm2 --dir $STATEDIR/models"
    echo "  systemctl enable --now distserved"
}

stop_all() {
    for unit in $(systemctl list-units --all --plain --no-legend 'distserved@*.service' |
        sed 's/ .*//') distserved.socket distserved.service; do
        systemctl disable --now "$unit" 2>/dev/null || systemctl stop "$unit" || true
    done
}

do_uninstall() {
    check_prefix
    ! is_running_systemd || stop_all
    for unit in distserved.service distserved@.service; do
        rm -f "$UNITS/$unit" "$UNITS/$unit.d/$DROP_IN"
        rmdir "$UNITS/$unit.d" 2>/dev/null || true
    done
    rm -f "$UNITS/distserved.socket" "$UNITS/multi-user.target.wants/distserved.service" \
        "$UNITS/multi-user.target.wants"/distserved@*.service \
        "$UNITS/sockets.target.wants/distserved.socket"
    rm -f "$FRAGMENTS/sysusers.d/distserved.conf" "$FRAGMENTS/tmpfiles.d/distserved.conf"
    if test -e "$VENV/bin/distserve"; then
        rm -rf "$VENV"
    fi
    rm -f "$CONFIG/node.toml.dist" "$PROGRAM/bin/distserve" "$PROGRAM/share/README.md" "$PROGRAM/share/node.toml" \
        "$PROGRAM/share/LICENSE"
    rmdir "$PROGRAM/bin" "$PROGRAM/share" "$PROGRAM" 2>/dev/null || true
    rm -rf "$DESTDIR$CACHEDIR"
    ! is_running_systemd || systemctl daemon-reload
    if test "${PURGE:-0}" = 1; then
        purge
    else
        say "Kept $CONFIG and $DESTDIR$STATEDIR; PURGE=1 removes them, too"
    fi
}

purge() {
    rm -rf "$CONFIG" "$DESTDIR$STATEDIR"
    if test -z "$DESTDIR" && id distserve >/dev/null 2>&1; then
        userdel distserve
    fi
}

case ${1:-} in
    check) check_prefix; check_interpreter "$2" ;;
    install) do_install ;;
    install-files) check_prefix; install_files ;; # all but the program
    uninstall) do_uninstall ;;
    *) fail "usage: $0 check PYTHON | install | install-files | uninstall" ;;
esac
