#!/bin/sh
# Makes .venv and, for the tests, installs the servers they talk to.
#
#   scripts/install.sh demo    the package and what the example project needs
#   scripts/install.sh test    tox, and Debian's packages where we may
#
# Nothing of Debian's is started by this: the tests run servers of their own.
set -eu
cd "$(dirname "$0")/.."

say() {
    printf '%s\n' "$*" >&2
}

# Run a command as root, or fail without asking for a password.
as_root() {
    if [ "$(id -u)" = 0 ]; then
        "$@"
    else
        sudo -n "$@"
    fi
}

may_install() {
    command -v apt-get >/dev/null && as_root true 2>/dev/null
}

# Install Debian packages without letting their services start.
apt_install() {
    policy=/usr/sbin/policy-rc.d
    if [ ! -e "$policy" ]; then
        printf '#!/bin/sh\nexit 101\n' | as_root tee "$policy" >/dev/null
        as_root chmod +x "$policy"
        trap 'as_root rm -f "$policy"' EXIT
    fi
    as_root apt-get update -q || say "apt-get update failed: using the old lists"
    known=
    for package in "$@"; do
        # A name that this release does not have must not stop the others.
        if apt-cache show "$package" >/dev/null 2>&1; then
            known="$known $package"
        fi
    done
    # shellcheck disable=SC2086  # a list of names
    [ -n "$known" ] && as_root env DEBIAN_FRONTEND=noninteractive \
        apt-get install -q -y --no-install-recommends $known
}

# Print the Debian packages whose programs are not here.
absent_packages() {
    [ -e "${ACTIVEMQ_HOME:-/usr/share/activemq}/bin/activemq.jar" ] || echo activemq
    [ -e /usr/lib/rabbitmq/bin/rabbitmq-server ] || echo rabbitmq-server
    command -v initdb >/dev/null || ls /usr/lib/postgresql/*/bin/initdb \
        >/dev/null 2>&1 || echo postgresql
    command -v pgbouncer >/dev/null || [ -x /usr/sbin/pgbouncer ] || echo pgbouncer
    command -v redis-server >/dev/null || echo redis-server
    command -v chromium >/dev/null || echo chromium
    command -v chromedriver >/dev/null || echo chromium-driver
    # Its compiler, for the JMS client of the tests; it brings the runtime along.
    command -v javac >/dev/null || echo openjdk-17-jdk-headless
    [ -e /usr/share/java/activemq-client.jar ] || echo libactivemq-java
    [ -e /usr/share/java/slf4j-nop.jar ] || echo libslf4j-java
    command -v openssl >/dev/null || echo openssl
}

install_servers() {
    absent=$(absent_packages | tr '\n' ' ')
    [ -n "$absent" ] || return 0
    if may_install; then
        # shellcheck disable=SC2086  # a list of names
        apt_install $absent || say "apt-get could not install: $absent"
        absent=$(absent_packages | tr '\n' ' ')
    fi
    if [ -n "$absent" ]; then
        say "Tests of what is not installed are skipped, or fail where CI=true."
        say "To run them, install as root: apt-get install $absent"
    fi
}

find_python() {
    for name in python3.11 python3.12 python3.13 python3.10 python3; do
        if "$name" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null
        then
            command -v "$name"
            return
        fi
    done
    say "Python 3.10 or newer is needed: apt-get install python3 python3-venv"
    return 1
}

make_environment() {
    if .venv/bin/python -m pip --version >/dev/null 2>&1; then
        return
    fi
    python=$(find_python)
    if ! "$python" -m venv --clear .venv >/dev/null 2>&1; then
        # Debian keeps what venv needs in a package of its own.
        may_install && apt_install python3-venv || {
            say "venv is missing. Install it as root: apt-get install python3-venv"
            return 1
        }
        "$python" -m venv --clear .venv
    fi
}

pip_install() {
    .venv/bin/python -m pip install --quiet --disable-pip-version-check "$@"
}

case "${1:-}" in
demo)
    make_environment
    pip_install --editable '.[example,typed]'
    ;;
test)
    install_servers
    make_environment
    pip_install 'tox>=4.22' 'tox-uv>=1.30'
    ;;
*)
    say "usage: scripts/install.sh demo|test"
    exit 2
    ;;
esac
