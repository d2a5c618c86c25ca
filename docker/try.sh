#!/usr/bin/env bash
# Tries the images and the compose file for real: builds them, brings up two workers and two managers, generates through a
# published port, asks Prometheus about it, kills one manager in the middle of an answer and later both, goes on with a
# conversation on another worker, adds a third one, takes it all down, and checks that nothing is left.
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
answer() { generate "$first" --chat --ignore-eos --max-new-tokens 250 "$PROMPT"; }
# same_answer_while COMMAND...: the answer is $expected, though the command is run in the middle of it.
same_answer_while() {
    answer >"$work/answer" &
    local answering=$!
    sleep 4
    kill -0 "$answering" || fail "the answer was over before: $*"
    "$@"
    wait "$answering" || fail "the answer failed"
    [ "$(cat "$work/answer")" = "$expected" ] || fail "the answer changed: $(cat "$work/answer")"
    say "the same answer, to the last letter"
}
# take_turn WORKER PROMPT: a turn of the conversation, with a budget in slots: a share would grow with the prompt.
take_turn() { generate "$1" --no-chat --session try --budget 64 --max-new-tokens 40 "$2"; }
# The value of a query that Prometheus answers with one number; 0 if it has none yet.
asked() {
    curl --fail --silent --max-time 10 --get --data-urlencode "query=$1" "http://127.0.0.1:9090/api/v1/query" |
        "$PYTHON" -c 'import json, sys; found = json.load(sys.stdin)["data"]["result"]; print(found[0]["value"][1] if found else 0)'
}
is_at_least() { "$PYTHON" -c 'import sys; sys.exit(float(sys.argv[1]) < float(sys.argv[2]))' "$(asked "$1")" "$2"; }
# expect QUERY NUMBER: within a minute Prometheus answers with that many, or more.
expect() {
    wait_for 60 is_at_least "$1" "$2" || fail "$1 is $(asked "$1"), not $2"
    printf '%s = %s\n' "$1" "$(asked "$1")"
}
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
services=(redis manager manager-2 worker worker-2 prometheus)
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
export COMPOSE_PROFILES=two
# Ranges: another worker is added in the end.
export WORKER_PORTS=50071-50072 WORKER_METRICS_PORTS=9121-9122
"$PYTHON" -c 'import secrets; print(secrets.token_hex(24))' >"$SCISSORHANDS_STORE_PASSWORD_FILE"
chmod 755 "$work"
managers_up='count(up{job="scissorhands-manager"} == 1)'
managers_planning='count(sum by (instance) (scissorhands_manager_plans_total{result="computed"}) > 0)'
workers_up='count(up{job="scissorhands-worker"} == 1)'

say "up"
up() { compose up --detach --no-build --wait --wait-timeout 300 "$@" "${services[@]}"; }
up
compose ps --format 'table {{.Service}}\t{{.Status}}\t{{.Ports}}'
for container in $(compose ps --quiet); do
    docker top "$container" -eo pid,uid,args | awk 'NR > 1 && $2 == 0 { print; root = 1 } END { exit root }' ||
        fail "it runs as root"
done

say "an answer through the published port"
first=$(published worker 50051)
second=$(published worker-2 50051)
expected=$(answer)
printf '%s\n' "$expected" | head -n 3

say "what Prometheus says about it"
expect 'sum(scissorhands_worker_generated_tokens_total)' 250
expect 'sum(scissorhands_worker_evictions_total)' 1
expect "$workers_up" 2
expect "$managers_up" 2
expect "$managers_planning" 2
expect 'sum(scissorhands_manager_store_up)' 2

say "one of the two managers is killed in the middle of an answer, and stays away"
same_answer_while compose kill manager-2

say "a conversation begins on one worker and goes on on the other"
question="A pair of scissors consists of"
said=$question$(take_turn "$first" "$question")
said="$said The handles"
said=$said$(take_turn "$second" "$said")
resumed='sum(scissorhands_worker_resumes_total{result="resumed"})'
expect "$resumed" 1
[ "$(asked "$managers_up")" = 1 ] || fail "the manager that was killed is up"
[ "$(asked 'sum(scissorhands_worker_segments_total{result="dropped"})')" = 0 ] || fail "segments were lost"

say "it is started again, and gets work"
up
works() { answer && is_at_least "$managers_planning" 2; }
wait_for 150 works || fail "the manager gets no work"
expect "$managers_planning" 2

say "both are killed in the middle of an answer, one after the other, and started again"
lose_both() {
    compose kill manager
    sleep 1
    compose kill manager-2
    up
}
same_answer_while lose_both
# One address for both workers: its calls take turns over them.
take_turn "ipv4:$first,$second" "$said The blades"
expect "$resumed" 2
expect "$managers_up" 2

say "a third worker"
up --scale worker=2 --no-recreate
expect "$workers_up" 3

say "down"
compose down --volumes --remove-orphans --timeout 30
[ -z "$(left container --all)$(left volume)$(left network)" ] || fail "something is left"
say "no container, no volume, no network is left"
