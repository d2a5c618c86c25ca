# Sourced by docker/try.sh: a container engine, compose and base images, also where none of them can be pulled.
# Uses $work, a folder that is deleted at the end, and sets DOCKER_HOST if the engine is one of its own.

DEBIAN=${DEBIAN:-http://deb.debian.org/debian}
COMPOSE_DEB=pool/main/d/docker-compose/docker-compose_2.26.1-4_amd64.deb
COMPOSE_SHA256=47681197cb2b1ab88206b42a1a92fc75f50d9530a6322d03494a473eed0408ea
engine_pid=

# Use the engine that runs here, or install Debian's and start one that keeps everything in $work.
start_engine() {
    if docker info >/dev/null 2>&1; then
        return
    fi
    [ "$(id -u)" -eq 0 ] || fail "no container engine answers, and starting one needs root"
    if ! command -v dockerd >/dev/null || ! command -v docker >/dev/null; then
        apt-get -q update
        DEBIAN_FRONTEND=noninteractive apt-get -q install -y --no-install-recommends docker.io containerd runc iptables
    fi
    export DOCKER_HOST=unix://$work/docker.sock
    # What the engine adds to the firewall is taken off again at the end.
    iptables-save >"$work/firewall"
    dockerd --data-root "$work/engine" --exec-root "$work/exec" --host "$DOCKER_HOST" --pidfile "$work/docker.pid" \
        >"$work/dockerd.log" 2>&1 &
    engine_pid=$!
    wait_for 30 docker info || { tail -n 20 "$work/dockerd.log" >&2; fail "dockerd does not start"; }
}

stop_engine() {
    [ -n "$engine_pid" ] || return 0
    kill "$engine_pid" 2>/dev/null || true
    wait "$engine_pid" 2>/dev/null || true
    iptables-restore <"$work/firewall"
    ip link delete docker0 2>/dev/null || true
    grep "$work" /proc/mounts | cut -d' ' -f2 | sort -r | xargs -r umount || true
}

# Compose 2, as a plugin that only this run sees.
find_compose() {
    if docker compose version >/dev/null 2>&1; then
        return
    fi
    export DOCKER_CONFIG=$work/config
    mkdir -p "$DOCKER_CONFIG/cli-plugins"
    curl --fail --silent --show-error --max-time 120 --output "$work/compose.deb" "$DEBIAN/$COMPOSE_DEB"
    echo "$COMPOSE_SHA256  $work/compose.deb" | sha256sum --check --quiet
    dpkg --extract "$work/compose.deb" "$work/compose"
    mv "$work/compose/usr/libexec/docker/cli-plugins/docker-compose" "$DOCKER_CONFIG/cli-plugins/"
    docker compose version >/dev/null
}

# Have an image by its name: here already, or pulled; otherwise "$@" is called to make a stand-in.
have_image() {
    local image=$1
    shift
    if docker image inspect "$image" >/dev/null 2>&1 || timeout 60 docker pull --quiet "$image" >/dev/null 2>&1; then
        return
    fi
    say "$image cannot be pulled; a stand-in is made from Debian's packages"
    "$@" "$image"
}

# Debian with Python, without what nobody reads, that trusts whom this machine trusts.
python_stand_in() {
    if ! command -v debootstrap >/dev/null; then
        apt-get -q update
        DEBIAN_FRONTEND=noninteractive apt-get -q install -y --no-install-recommends debootstrap
    fi
    local root=$work/base
    debootstrap --variant=minbase --include=ca-certificates,python3,python3-venv bookworm "$root" "$DEBIAN" \
        >"$work/debootstrap.log" 2>&1 || { tail "$work/debootstrap.log" >&2; fail "debootstrap failed"; }
    cp /etc/ssl/certs/ca-certificates.crt "$root/etc/ssl/certs/"
    ln -s /usr/bin/python3 "$root/usr/local/bin/python"
    rm -rf "$root"/var/cache/apt/* "$root"/var/lib/apt/lists/* "$root"/usr/share/{doc,man,locale}
    tar -C "$root" -c . | docker import - "$1" >/dev/null
    rm -rf "$root"
}

redis_stand_in() {
    docker build --quiet --tag "$1" - >/dev/null <<END
FROM $PYTHON_IMAGE
RUN apt-get -q update && apt-get -q install -y --no-install-recommends redis-server
END
}

prometheus_stand_in() {
    docker build --quiet --tag "$1" - >/dev/null <<END
FROM $PYTHON_IMAGE
RUN apt-get -q update && apt-get -q install -y --no-install-recommends prometheus wget \
    && install --directory --owner=nobody /prometheus
USER nobody
ENTRYPOINT ["prometheus"]
END
}

# Serve the build of torch that pip finds on this machine to the build of the image, as a package index.
serve_torch() {
    "$PYTHON" -m pip download --quiet --no-deps --constraint constraints.txt --dest "$work/index/torch" torch
    local gateway
    # Where containers reach this machine.
    gateway=$(docker run --rm --network bridge "$PYTHON_IMAGE" python -c '
import socket, struct
routes = [line.split() for line in open("/proc/net/route")][1:]
print(next(socket.inet_ntoa(struct.pack("<I", int(way, 16))) for _, to, way, *_ in routes if to == "00000000"))')
    [ -n "$gateway" ] || fail "containers have no way to this machine"
    "$PYTHON" -m http.server --bind "$gateway" --directory "$work/index" 8765 >"$work/index.log" 2>&1 &
    index_pid=$!
    torch_arguments=(--build-arg "TORCH_INDEX_URL=http://$gateway:8765" --build-arg "TORCH_INDEX_HOST=$gateway")
}
