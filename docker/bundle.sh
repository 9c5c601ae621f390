#!/usr/bin/env bash
# Writes one archive that installs the service on a host without a network: images, compose, a model, checksums, SBOM.
#
#   docker/bundle.sh MODEL TARGET [FOLDER]     MODEL: a folder in Hugging Face layout; TARGET: gpu or cpu;
#                                              FOLDER: where the archive goes (dist)
#
# Images of Prometheus and Grafana are put in where this host has them (docker pull). DOCKER and SYFT name other programs.
[ -n "${BASH_VERSION:-}" ] || { echo "bundle.sh: this needs bash; start it as docker/bundle.sh" >&2 && exit 2; }
set -euo pipefail
docker=${DOCKER:-docker}
syft=${SYFT:-syft}

fail() {
    printf 'bundle.sh: %s\n' "$1" >&2
    exit 2
}

[ $# -ge 2 ] || fail "give a model folder and a target, as in: docker/bundle.sh /srv/models/NAME gpu"
[ -f "$1/config.json" ] || fail "$1 has no config.json; give a folder in Hugging Face layout"
command -v "$syft" >/dev/null || fail "there is no $syft, which lists what is in the image; make bundle installs it"
# With the name that was given, where that is a link.
model=$(CDPATH="" cd -- "$1" && pwd)
target=$2
out=$(realpath -m "${3:-dist}")
near=$out # or what there is of its path
until [ -d "$near" ]; do near=$(dirname "$near"); done
# Links are followed, as tar will do. Of a loop of links find itself speaks.
if ! unfit=$(LC_ALL=C find -L "$model" ! -readable -print -quit 2>&1) || [ -n "$unfit" ]; then
    fail "the model has a link that leads nowhere, or what user $(id -u) may not read: ${unfit%%$'\n'*}"
fi
[ -z "$(find -L "$model" -samefile "$near" -print -quit)" ] || fail "$out is in the model, $model; name another folder"
cd "$(dirname "$0")/.."
version=$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
image=quire:$version-$target
"$docker" image inspect "$image" >/dev/null 2>&1 || fail "there is no image $image; make docker TARGET=$target builds it"

name=quire-$version-$target
mkdir -p "$out" 2>/dev/null && [ -w "$out" ] || fail "$out is no folder that user $(id -u) may write"
stage=$(mktemp -d "$out/bundle.XXXXXX")
trap 'rm -rf "$stage"' EXIT
# With models/, so that the archive has it with a mode that the server's user can enter.
mkdir -p "$stage/$name/images" "$stage/$name/models"
cp -r docker/compose.yaml docker/.env.example docker/install.sh docker/prometheus docker/grafana LICENSE CHANGELOG.md \
    docs "$stage/$name/"
"$docker" save "$image" | gzip -n >"$stage/$name/images/$name.tar.gz"
watchers=()
for watcher in $(sed -n 's/^ *image: \(prom\|grafana\)/\1/p' docker/compose.yaml); do
    if "$docker" image inspect "$watcher" >/dev/null 2>&1; then
        watchers+=("$watcher")
    else
        echo "left out, because this host does not have it (docker pull $watcher): $watcher"
    fi
done
if [ ${#watchers[@]} -gt 0 ]; then
    "$docker" save "${watchers[@]}" | gzip -n >"$stage/$name/images/observability.tar.gz"
fi
SYFT_CHECK_FOR_APP_UPDATE=false "$syft" scan --quiet "docker:$image" --source-name quire --source-version "$version" \
    --output "spdx-json=$stage/$name/sbom.spdx.json"

# The model is read where it lies: it may be larger than what is free here twice.
folder=$(dirname "$model")
base=$(basename "$model")
{
    (cd "$stage/$name" && find . -type f -print0 | sort -z | xargs -0 sha256sum | sed 's,  \./,  ,')
    (cd "$folder" && find -L "$base" -type f -print0 | sort -z | xargs -0 sha256sum | sed 's,  ,  models/,')
} >"$stage/SHA256SUMS"
mv "$stage/SHA256SUMS" "$stage/$name/"
everybody=(--owner=0 --group=0 --mode=a+rX,go-w)
tar -cf "$stage/$name.tar" "${everybody[@]}" -C "$stage" "$name"
tar -rhf "$stage/$name.tar" "${everybody[@]}" --transform "s,^,$name/models/," -C "$folder" "$base"
(cd "$stage" && sha256sum "$name.tar" >"$name.tar.sha256")
# No checksum is ever there but for the archive beside it.
rm -f "$out/$name.tar.sha256"
mv "$stage/$name.tar" "$stage/$name.tar.sha256" "$out"
echo "$out/$name.tar"
