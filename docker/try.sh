#!/usr/bin/env bash
# Tries the images and the compose file for real: builds them, brings the stack up, generates through a published port,
# asks Prometheus about it, kills the manager in the middle of an answer, goes on with a conversation on a second worker,
# takes it all down, and checks that nothing is left.
#
#   docker/try.sh          from anywhere; as root, if no container engine answers yet
#
# What cannot be pulled is made from Debian's packages (docker/try/engine.sh); without Grafana, of which Debian has none.
# Needs what `make venv-all model` makes, and makes it if it is not there.
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON_IMAGE=python:3.11.13-slim-bookworm
MOST_MANAGER_BYTES=250000000
VENV=${VENV:-.venv}
PYTHON=$VENV/bin/python
PROMPT="Explain in detail how a pair of scissors is made, step by step."

work=$(mktemp -d /tmp/scissorhands-try-XXXXXX)
index_pid=
torch_arguments=()
began=$SECONDS

say() { printf '[%4d s] %s\n' $((SECONDS - began)) "$*"; }
fail() { printf 'try.sh: %s\n' "$*" >&2; exit 1; }

# wait_for SECONDS COMMAND...: until it succeeds.
wait_for() {
    local end=$((SECONDS + $1))
    shift
    until "$@" >/dev/null 2>&1; do
        [ "$SECONDS" -lt "$end" ] || return 1
        sleep 0.5
    done
}

# shellcheck source=docker/try/engine.sh
. docker/try/engine.sh

compose() { docker compose --file docker/compose.yaml --project-name "$project" "$@"; }
# The address at which a replica of a service is published: service, port, replica.
published() { compose port --index "${3:-1}" "$1" "$2"; }
generate() { "$VENV/bin/scissorhands" generate --server "$1" --quiet --budget 20% --timeout 300 "${@:2}"; }
# The value of a query that Prometheus answers with one number; 0 if it has none yet.
asked() {
    curl --fail --silent --max-time 10 --get --data-urlencode "query=$1" "http://127.0.0.1:9090/api/v1/query" |
        "$PYTHON" -c 'import json, sys; found = json.load(sys.stdin)["data"]["result"]; print(found[0]["value"][1] if found else 0)'
}
is_at_least() { "$PYTHON" -c 'import sys; sys.exit(float(sys.argv[1]) < float(sys.argv[2]))' "$(asked "$1")" "$2"; }
left() {
    docker "$1" ls --quiet --filter "label=com.docker.compose.project=$project" "${@:2}"
}

clean_up() {
    local status=$?
    trap - EXIT
    if [ "$status" -ne 0 ] && [ -n "${project:-}" ]; then
        compose ps --all || true
        compose logs --tail 40 || true
    fi
    [ -z "$index_pid" ] || kill "$index_pid" 2>/dev/null || true
    [ -z "${project:-}" ] || compose --profile '*' down --volumes --remove-orphans --timeout 30 >/dev/null 2>&1 || true
    stop_engine
    rm -rf "$work"
    say "exit status $status"
    exit "$status"
}
trap clean_up EXIT
trap 'exit 130' INT TERM

[ -x "$VENV/bin/scissorhands" ] && [ -d .models/smollm2-135m-instruct ] || make venv-all model VENV="$VENV"

say "engine"
start_engine
find_compose
docker version --format 'engine {{.Server.Version}}'
docker compose version
export DOCKER_BUILDKIT=0

say "images"
have_image "$PYTHON_IMAGE" python_stand_in
services=(redis manager worker prometheus)
have_image redis:7.2.5-alpine redis_stand_in
have_image prom/prometheus:v3.5.0 prometheus_stand_in
if timeout 60 docker pull --quiet grafana/grafana:11.6.1 >/dev/null 2>&1; then
    services+=(grafana)
else
    say "grafana/grafana:11.6.1 cannot be pulled; it is left out"
fi
docker build --quiet --file docker/manager.Dockerfile --tag scissorhands-manager:0.1.0 . >/dev/null
serve_torch
docker build --quiet "${torch_arguments[@]}" --file docker/worker.Dockerfile --tag scissorhands-worker:0.1.0 . >/dev/null
docker image ls --format '{{.Repository}}:{{.Tag}} {{.Size}}' | grep -v '<none>'
size=$(docker image inspect --format '{{.Size}}' scissorhands-manager:0.1.0)
[ "$size" -lt "$MOST_MANAGER_BYTES" ] || fail "the manager's image has $size bytes, more than $MOST_MANAGER_BYTES"

project=scissorhands-try
export SCISSORHANDS_MODEL=smollm2-135m-instruct SCISSORHANDS_STORE_PASSWORD_FILE=$work/store_password
# Ranges: two workers are published in the end.
export WORKER_PORTS=50061-50062 WORKER_METRICS_PORTS=9111-9112
"$PYTHON" -c 'import secrets; print(secrets.token_hex(24))' >"$SCISSORHANDS_STORE_PASSWORD_FILE"
chmod 755 "$work"

say "up"
compose up --detach --no-build --wait --wait-timeout 300 "${services[@]}"
compose ps --format 'table {{.Service}}\t{{.Status}}\t{{.Ports}}'

say "an answer through the published port"
first=$(published worker 50051)
expected=$(generate "$first" --chat --ignore-eos --max-new-tokens 200 "$PROMPT")
printf '%s\n' "$expected" | head -n 3

say "what Prometheus says about it"
wait_for 60 is_at_least 'sum(scissorhands_worker_generated_tokens_total)' 200 || fail "Prometheus has not seen 200 tokens"
for query in 'sum(scissorhands_worker_generated_tokens_total)' 'sum(scissorhands_worker_evictions_total)' \
    'sum(scissorhands_manager_store_up)' 'count(up == 1)'; do
    printf '%s = %s\n' "$query" "$(asked "$query")"
done

say "the manager's container is killed in the middle of an answer, and started again"
generate "$first" --chat --ignore-eos --max-new-tokens 200 "$PROMPT" >"$work/answer" &
answering=$!
sleep 5
compose kill manager
kill -0 "$answering" || fail "the answer was over before the manager was killed"
compose up --detach --no-build --wait --wait-timeout 60 manager
wait "$answering" || fail "the answer failed without its manager"
[ "$(cat "$work/answer")" = "$expected" ] || fail "the answer changed: $(cat "$work/answer")"
say "the same answer, to the last letter"

say "a conversation begins on one worker and goes on on a second one"
# In slots: a share of the length would be another budget for the second turn, whose prompt is longer.
turn=(--no-chat --ignore-eos --session try --budget 64 --max-new-tokens 80)
question="A pair of scissors consists of"
said=$(generate "$first" "${turn[@]}" "$question")
compose up --detach --no-build --wait --wait-timeout 300 --scale worker=2 --no-recreate "${services[@]}"
second=$(published worker 50051 2)
[ "$first" != "$second" ] || second=$(published worker 50051 1)
generate "$second" "${turn[@]}" "$question$said The handles" ||
    fail "the second worker does not answer"
wait_for 60 is_at_least 'sum(scissorhands_worker_resumes_total{result="resumed"})' 1 || fail "it did not resume the row"
wait_for 60 is_at_least 'count(up{job="scissorhands-worker"} == 1)' 2 || fail "Prometheus does not see two workers"
say "Prometheus sees $(asked 'count(up{job="scissorhands-worker"} == 1)') workers"

say "down"
compose down --volumes --remove-orphans --timeout 30
[ -z "$(left container --all)$(left volume)$(left network)" ] || fail "something is left"
say "no container, no volume, no network is left"
