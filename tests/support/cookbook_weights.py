"""Downloads a training state with tinker-cookbook, and makes an adapter and a merged model of it.

The arguments are the state's path, the folder of its base model, and a folder for the results:
`downloaded`, `adapter` in PEFT's form, and `merged`."""

from __future__ import annotations

import sys

from tinker_cookbook import weights


def main(state: str, base: str, folder: str) -> None:
    downloaded = weights.download(tinker_path=state, output_dir=f"{folder}/downloaded")
    weights.build_lora_adapter(
        base_model=base, adapter_path=downloaded, output_path=f"{folder}/adapter"
    )
    weights.build_hf_model(base_model=base, adapter_path=downloaded, output_path=f"{folder}/merged")


if __name__ == "__main__":
    main(*sys.argv[1:])
