#!/usr/bin/env bash
# Sets up the service in this folder: checks the files, loads the images, writes .env and secrets/. Needs no network.
#
#   ./install.sh [MODEL]     MODEL: a folder inside models/; not needed where there is only one
#
# .env and secrets that are there stay as they are, but for VERSION. So to upgrade, copy both into the new folder first.
# What ends this before it says "Ready" leaves no half file; run it again. DOCKER names another client than `docker`.
[ -n "${BASH_VERSION:-}" ] || { echo "install.sh: this needs bash; start it as ./install.sh" >&2 && exit 2; }
set -euo pipefail
shopt -s nullglob
docker=${DOCKER:-docker}

fail() {
    printf 'install.sh: %s\n' "$1" >&2
    exit 2
}

missing=
for program in awk basename cat chmod cp cut dirname grep head id mkdir mv od readlink rm sed sha256sum tail tr; do
    command -v "$program" >/dev/null || missing+=" $program"
done
[ -z "$missing" ] || fail "these programs are needed and not installed:$missing"
cd "$(dirname "$0")"

expect() { # -f or -d, PATH: it is that, or not there yet
    if [ -e "$2" ] || [ -L "$2" ]; then
        [ "$1" "$2" ] || fail "$2 must be a $([ "$1" = -d ] && echo folder || echo file); move what is there away"
        [ -r "$2" ] || fail "$2: user $(id -u) may not read it; run this as its owner"
    fi
}

put() { # PATH MODE TEXT: whole or not at all; a file that is there keeps its owner
    local error
    if ! error=$(
        exec 2>&1
        umask 077
        { [ ! -e "$1" ] || cp -p "$1" "$1.new"; } && printf %s "$3" >"$1.new" && chmod "$2" "$1.new" &&
            mv -f "$1.new" "$1"
    ); then
        rm -f "$1.new"
        fail "$1 cannot be written: ${error##*: }"
    fi
}

setting() { # NAME: its value in $settings, the text of .env, as compose reads it; empty where it has none
    printf '%s\n' "$settings" | sed -nE "s/^$1=//p" | tail -n 1 |
        sed -E 's/[[:space:]]+#.*//; s/[[:space:]]+$//; s/^(["'\''])(.*)\1$/\2/'
}

set_variable() { # NAME VALUE: in $settings, where it is set last, or else where the example has it
    settings=$(printf '%s\n' "$settings" | NAME=$1 VALUE=$2 awk '
        BEGIN { name = ENVIRON["NAME"] "=" }
        { lines[NR] = $0 }
        index($0, name) == 1 { place = NR }
        index($0, "# " name) == 1 && !example { example = NR }
        END {
            if (!place) place = example ? example : NR + 1
            lines[place] = name ENVIRON["VALUE"]
            for (i = 1; i <= NR || i == place; i++) print lines[i]
        }')
}

random() { # BYTES, as hexadecimal digits
    head -c "$1" /dev/urandom | od -An -v -tx1 | tr -d ' \n'
}

digest() {
    printf %s "$1" | sha256sum | cut -d ' ' -f 1
}

check_model() { # FOLDER: what the server reads of it is there, also in the container, which sees nothing but $models
    local file root
    [ -f "$1/config.json" ] || fail "$1 has no config.json; put a folder in Hugging Face layout there"
    root=$(readlink -f "$models")
    for file in "$1" "$1"/*; do
        if [[ ! -e $file || $(readlink "$file") == /* || $(readlink -f "$file") != "$root"/* ]]; then
            fail "$file is a link to nothing, or to nothing in $models; copy the model as files (cp -rL)"
        fi
    done
}

[ -w . ] || fail "user $(id -u) may not write in $PWD, or its disk is read-only"
expect -f .env
old=
[ ! -f .env ] || old=$(cat .env)
settings=${old:-$(cat .env.example)}
models=$(setting MODELS) models=${models:-models}
secrets=$(setting SECRETS) secrets=${secrets:-secrets}
expect -d "$secrets"
for name in api_keys metrics_key grafana_password; do
    expect -f "$secrets/$name"
done

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

model=${1:-$(setting MODEL)}
if [ -z "$model" ]; then
    folders=("$models"/*/)
    [ ${#folders[@]} -gt 0 ] ||
        fail "$models/ holds no model; put a folder in Hugging Face layout there (make demo-model writes one)"
    [ ${#folders[@]} -eq 1 ] || fail "$models/ holds ${#folders[@]} folders; name one of them: ./install.sh MODEL"
    model=$(basename "${folders[0]}")
fi
check_model "$models/$model"
[ "$(setting MODEL)" = "$model" ] || set_variable MODEL "$model"
[ "$(setting MODEL)" = "$model" ] || fail "the name '$model' cannot stand in .env; give the folder a plainer one"

for image in images/*.tar.gz; do
    "$docker" load --input "$image" || fail "$image cannot be loaded"
done
delivered=(images/quire-*.tar.gz)
if [ ${#delivered[@]} -gt 0 ]; then
    tag=$(basename "${delivered[0]}" .tar.gz) # quire-VERSION-TARGET
    target=${tag##*-}
    version=${tag#quire-}
    set_variable VERSION "${version%-*}"
fi
# As root the server gets a user of its own, whose group 0 may read what root writes here.
[ -n "$old" ] || [ "$(id -u)" -eq 0 ] || set_variable RUN_AS "$(id -u)"
if [ "$settings" != "$old" ]; then
    like=.env
    [ -f .env ] || like=.env.example
    # The file itself where .env is a link.
    put "$(readlink -f .env)" "--reference=$like" "$settings"$'\n'
fi

mkdir -p "$secrets" 2>/dev/null && chmod 750 "$secrets" 2>/dev/null && [ -w "$secrets" ] ||
    fail "$secrets: user $(id -u) may not make or change it; run this as its owner"
# Prometheus and Grafana read theirs as other users; the folder keeps users of this host out.
if [ ! -s "$secrets/grafana_password" ]; then
    password=$(random 16)
    put "$secrets/grafana_password" 644 "$password"
fi
if [ ! -s "$secrets/metrics_key" ]; then
    metrics=$(random 24)
    put "$secrets/metrics_key" 644 "sk-$metrics"
fi
metrics=$(cat "$secrets/metrics_key")
line="metrics sha256:$(digest "$metrics")"
if [ ! -s "$secrets/api_keys" ]; then
    key=$(random 24)
    hash=$(digest "sk-$key")
    put "$secrets/api_keys" 640 "# NAME KEY [requests=N] [tokens_per_minute=N]; read again when it changes
default sha256:$hash
$line
"
    echo "The key for clients, of which only a hash is kept: sk-$key"
elif ! grep -qF -e "${line#* }" -e "$metrics" "$secrets/api_keys"; then
    echo "$secrets/api_keys lacks the key of Prometheus; where it is to watch, add the line: $line"
fi

version=$(setting VERSION)
version=${version:-$(sed -n 's/.*{VERSION:-\([^}]*\)}.*/\1/p' compose.yaml | head -n 1)}
echo "Ready. Read .env, then start the service, which is healthy once the model is loaded:"
for target in ${target:-gpu cpu}; do
    if "$docker" image inspect "quire:$version-$target" >/dev/null 2>&1; then
        echo "  cd $PWD && $compose --profile $target up -d"
    else
        echo "  ($target: there is no image quire:$version-$target; from a checkout: make docker TARGET=$target)"
    fi
done
