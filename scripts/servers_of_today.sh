#!/bin/sh
# Newer servers and Pythons than this machine has, each Debian in a folder.
#
#   scripts/servers_of_today.sh                   make the folders: minutes, 3 GB
#   scripts/servers_of_today.sh in FOLDER [-u USER] COMMAND...
#                                                 run a command in one of them
#
#   trixie   PostgreSQL 17, RabbitMQ 4.0, ActiveMQ 5.17.6
#   sid      PostgreSQL 18, RabbitMQ 4.3, Python 3.14 and 3.15 (Debian's next release)
#
# They are in TXMSG_TEST_ROOTS, or in ~/.cache/txmsg/roots. A command sees this
# machine's network, /tmp and checkout. What is mounted for it goes with it: the
# folders can be removed at any time.
set -eu
roots=${TXMSG_TEST_ROOTS:-$HOME/.cache/txmsg/roots}
mirror=${DEBIAN_MIRROR:-http://deb.debian.org/debian}
checkout=$(cd "$(dirname "$0")/.." && pwd)

say() {
    printf '%s\n' "$*" >&2
}

# Run in a folder: FOLDER USER COMMAND... A namespace of its own holds the mounts.
run_in() {
    root=$roots/$1 user=$2
    shift 2
    [ -d "$root/etc" ] || {
        say "$root is missing: run scripts/servers_of_today.sh"
        exit 1
    }
    # shellcheck disable=SC2016  # the inner shell's variables
    exec unshare --mount --propagation slave sh -euc '
        root=$1 checkout=$2 user=$3
        shift 3
        for there in /proc /sys /dev /tmp "$checkout"; do
            mkdir -p "$root$there"
            mount --rbind "$there" "$root$there"
        done
        here=$(pwd)
        mkdir -p "$root$here"
        exec chroot --userspec="$user" "$root" env -C "$here" "$@"
    ' sh "$root" "$checkout" "$user" "$@"
}

in_folder() {
    folder=$1 user=root:root
    shift
    if [ "${1:-}" = -u ]; then
        user=$2:$2
        shift 2
    fi
    run_in "$folder" "$user" "$@"
}

install_in() {
    folder=$1
    shift
    # Debian's next release is signed for a short while only.
    (cd / && in_folder "$folder" env DEBIAN_FRONTEND=noninteractive \
        apt-get -o Acquire::Check-Valid-Until=false -q "$@")
}

make_folders() {
    if [ "$(id -u)" != 0 ] || ! command -v debootstrap >/dev/null; then
        say "This takes root and debootstrap: apt-get install debootstrap."
        say "Elsewhere start the servers by docker compose up, and see docs/contributing.md."
        exit 1
    fi
    mkdir -p "$roots"
    for folder in trixie sid; do
        [ -e "$roots/$folder/made" ] && continue
        rm -rf "${roots:?}/$folder"
        debootstrap --variant=minbase trixie "$roots/$folder" "$mirror"
        printf '#!/bin/sh\nexit 101\n' >"$roots/$folder/usr/sbin/policy-rc.d"
        chmod +x "$roots/$folder/usr/sbin/policy-rc.d"
        install_in "$folder" install -y --no-install-recommends ca-certificates
        # A proxy between this machine and the package index is trusted there too.
        for file in /etc/ssl/certs/ca-certificates.crt /etc/pip.conf; do
            [ -e "$file" ] && cp "$file" "$roots/$folder$file"
        done
        if [ "$folder" = trixie ]; then
            install_in trixie install -y --no-install-recommends \
                postgresql-17 rabbitmq-server activemq openjdk-21-jre-headless
        else
            echo "deb $mirror sid main" >"$roots/sid/etc/apt/sources.list.d/sid.list"
            install_in sid update
            install_in sid install -y --no-install-recommends -t sid \
                postgresql-18 rabbitmq-server activemq openjdk-21-jdk-headless \
                libactivemq-java libslf4j-java pgbouncer redis-server openssl make \
                python3.14-venv python3.15-venv
        fi
        touch "$roots/$folder/made"
    done
}

case "${1:-}" in
'') make_folders ;;
in)
    shift
    in_folder "$@"
    ;;
*)
    sed -n '3,11s/^# \{0,1\}//p' "$0" >&2
    exit 2
    ;;
esac
