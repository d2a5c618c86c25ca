#!/usr/bin/env bash
# Installs Debian's redis-server and prometheus if their binaries are missing. The tests start them on ports of their
# own; the packages' system services stay stopped and disabled, so that the default ports stay free.
set -euo pipefail

packages=()
services=()
if ! command -v redis-server >/dev/null; then
    packages+=(redis-server)
    services+=(redis-server)
fi
if ! command -v prometheus >/dev/null || ! command -v promtool >/dev/null; then
    packages+=(prometheus)
    services+=(prometheus)
fi
if [ ${#packages[@]} -eq 0 ]; then
    exit 0
fi
if ! command -v apt-get >/dev/null; then
    echo "error: the tests need redis-server, prometheus and promtool on PATH; install: ${packages[*]}" >&2
    exit 1
fi

as_root=()
if [ "$(id -u)" -ne 0 ]; then
    if ! command -v sudo >/dev/null; then
        echo "error: installing ${packages[*]} needs root; run as root: apt-get install ${packages[*]}" >&2
        exit 1
    fi
    as_root=(sudo)
fi

# Debian's packages start their services unless this file says no. An existing one is somebody's decision and stays.
policy=/usr/sbin/policy-rc.d
if [ ! -e "$policy" ]; then
    trap '"${as_root[@]}" rm -f "$policy"' EXIT
    printf '#!/bin/sh\nexit 101\n' | "${as_root[@]}" tee "$policy" >/dev/null
    "${as_root[@]}" chmod 755 "$policy"
fi

echo "installing ${packages[*]}"
"${as_root[@]}" apt-get -q update
"${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -q install -y --no-install-recommends "${packages[@]}"

if [ -d /run/systemd/system ]; then
    "${as_root[@]}" systemctl disable --now "${services[@]}"
else
    for service in "${services[@]}"; do
        "${as_root[@]}" update-rc.d "$service" disable
    done
fi
