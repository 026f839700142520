#!/usr/bin/env bash
# Installs axe-core into .venv/axe, for the nightly tests of the page. Needs npm.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
folder=$root/.venv/axe
version=4.14.1
[ "$(cat "$folder/version" 2>/dev/null)" = "$version" ] && exit 0
command -v npm >/dev/null || { echo "axe.sh: npm is not installed; the tests with axe are skipped" >&2; exit 0; }
rm -rf "$folder"
mkdir -p "$folder"
cd "$folder"
npm pack --silent "axe-core@$version" >/dev/null
tar -xzf "axe-core-$version.tgz" package/axe.min.js
mv package/axe.min.js .
rm -r package "axe-core-$version.tgz"
echo "$version" > version
