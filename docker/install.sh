#!/usr/bin/env bash
# Sets up the service in this folder: checks the files, loads the images, writes .env and secrets/. Needs no network.
#
#   ./install.sh [MODEL]     MODEL: a folder inside models/; not needed where there is only one
#
# .env and secrets that are there stay as they are, but for VERSION. So to upgrade, copy both into the new folder first.
# DOCKER names another client than `docker`.
set -euo pipefail
cd "$(dirname "$0")"
docker=${DOCKER:-docker}

fail() {
    printf 'install.sh: %s\n' "$1" >&2
    exit 2
}

set_variable() { # NAME VALUE: in .env, in the place where the example has it
    NAME=$1 VALUE=$2 awk '
        BEGIN { name = ENVIRON["NAME"]; line = name "=" ENVIRON["VALUE"] }
        !done && (index($0, name "=") == 1 || index($0, "# " name "=") == 1) { print line; done = 1; next }
        { print }
        END { if (!done) print line }' .env >.env.new
    cat .env.new >.env
    rm .env.new
}

random() { # BYTES, as hexadecimal digits
    head -c "$1" /dev/urandom | od -An -v -tx1 | tr -d ' \n'
}

digest() {
    printf %s "$1" | sha256sum | cut -d ' ' -f 1
}

image_version() { # of the images, as compose reads it
    sed -n 's/^VERSION=//p' .env | grep . || sed -n 's/.*{VERSION:-\([^}]*\)}.*/\1/p' compose.yaml | head -n 1
}

if [ -f SHA256SUMS ]; then
    sha256sum --check --strict --quiet SHA256SUMS ||
        fail "files are missing or differ from SHA256SUMS; copy and unpack the bundle again"
fi

"$docker" version --format '{{.Server.Version}}' >/dev/null 2>&1 ||
    fail "no Docker engine answers; start it, or run this as a user that may use it"
if "$docker" compose version >/dev/null 2>&1; then
    compose="$docker compose"
elif command -v docker-compose >/dev/null; then
    compose="docker-compose"
else
    fail "there is neither 'docker compose' nor docker-compose; install one of them"
fi

model=${1:-}
if [ -z "$model" ] && [ ! -f .env ]; then
    shopt -s nullglob
    models=(models/*/)
    [ ${#models[@]} -gt 0 ] ||
        fail "models/ holds no model; put a folder in Hugging Face layout there (make demo-model writes one)"
    [ ${#models[@]} -eq 1 ] || fail "models/ holds ${#models[@]} folders; name one of them: ./install.sh MODEL"
    model=$(basename "${models[0]}")
fi
if [ -n "$model" ] && [ ! -f "models/$model/config.json" ]; then
    fail "models/$model has no config.json; put a folder in Hugging Face layout there"
fi

shopt -s nullglob
for image in images/*.tar.gz; do
    "$docker" load --input "$image"
done
delivered=(images/quire-*.tar.gz)
if [ ${#delivered[@]} -gt 0 ]; then
    tag=$(basename "${delivered[0]}" .tar.gz) # quire-VERSION-TARGET
    target=${tag##*-}
    version=${tag#quire-}
    version=${version%-*}
fi

if [ ! -f .env ]; then
    cp .env.example .env
    # As root the server gets a user of its own, whose group 0 may read what root writes here.
    [ "$(id -u)" -eq 0 ] || set_variable RUN_AS "$(id -u)"
fi
[ -z "$model" ] || set_variable MODEL "$model"
[ -z "${version:-}" ] || set_variable VERSION "$version"

mkdir -p secrets
chmod 750 secrets
if [ ! -f secrets/api_keys ]; then
    key=sk-$(random 24)
    metrics=sk-$(random 24)
    # Prometheus and Grafana read theirs as other users; the folder keeps users of this host out.
    printf %s "$metrics" >secrets/metrics_key
    printf %s "$(random 16)" >secrets/grafana_password
    chmod 644 secrets/metrics_key secrets/grafana_password
    {
        echo "# NAME KEY [requests=N] [tokens_per_minute=N]; read again when it changes"
        echo "default sha256:$(digest "$key")"
        echo "metrics sha256:$(digest "$metrics")"
    } >secrets/api_keys
    chmod 640 secrets/api_keys
    echo "The key for clients, of which only a hash is kept: $key"
fi

echo "Ready. Read .env, then start the service, which is healthy once the model is loaded:"
for target in ${target:-gpu cpu}; do
    if "$docker" image inspect "quire:$(image_version)-$target" >/dev/null 2>&1; then
        echo "  cd $PWD && $compose --profile $target up -d"
    else
        echo "  ($target: there is no image quire:$(image_version)-$target; from a checkout: make docker TARGET=$target)"
    fi
done
