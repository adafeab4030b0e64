//! Commands that serve the drafter.

use std::fmt::Write;

use dflash_formats::draft::{BlockShape, Layout, Outline};

use super::{Card, plain};
use crate::drafter::VOCABULARY;

/// Placeholder for a target whose name is not known.
const TARGET: &str = "TARGET";

/// Whether SGLang serves a draft of this shape: it returns only states between the target's layers.
fn suits_sglang(shape: &Outline) -> bool {
    let last = |&id: &u32| Some(i64::from(id)) == shape.num_target_layers;
    shape.layout == Layout::ZLab && !shape.target_layer_ids.iter().any(|id| *id == 0 || last(id))
}

impl Card<'_> {
    pub(super) fn serving(&self) -> String {
        let mut text = "## Serving\n".to_owned();
        if !self.drafter.shape.head.is_plain() {
            text.push_str(&self.dflash());
            return text;
        }
        let Some(block) = self.drafter.shape.block() else {
            text.push_str("\nThe files do not say how many tokens a block has.\n");
            return text;
        };
        let target = self.base_model().unwrap_or_else(|| TARGET.to_owned());
        if self.is_pruned_for_dflash_alone() {
            text.push_str(&self.pruned(&target));
        } else if !self.drafter.is_gguf_alone() {
            text.push_str(&self.engines(&target, block));
        }
        text.push_str(&self.llama_cpp(block));
        if self.drafter.shape.layout == Layout::ZLab && !self.is_pruned_for_dflash_alone() {
            text.push_str(&self.transformers(&target));
        }
        text
    }

    /// Commands for a draft with a head other than DFlash's, which only this program serves.
    fn dflash(&self) -> String {
        let target = self.base_model().unwrap_or_else(|| TARGET.to_owned());
        let (repo, kind) = (&self.settings.repo, plain(&self.drafter.shape.head.kind));
        let block = self.drafter.shape.block().map_or_else(String::new, |block| {
            format!(" It proposes {} tokens at a time.", block.proposals())
        });
        // A branch is downloaded first, because names on the Hub stand for their main branch.
        let revision = self.settings.revision.as_deref();
        let download = revision.map_or_else(String::new, |name| {
            format!("hf download {repo} --revision {name} --local-dir drafter\n")
        });
        let draft = if revision.is_some() { "drafter" } else { repo };
        format!(
            "\nIts head is {kind}, not DFlash's own, and vLLM, SGLang, llama.cpp and Transformers do \
             not serve it yet; dflash does.{block}\n\n```sh\n{download}dflash serve --target {target} \
             --draft {draft}\ndflash generate --target {target} --draft {draft} --prompt \"What is 17 \
             times 23?\"\n```\n"
        )
    }

    /// Whether the files have a pruned vocabulary in a layout that has no place for one.
    fn is_pruned_for_dflash_alone(&self) -> bool {
        self.drafter.shape.layout == Layout::ZLab && self.drafter.files.contains_key(VOCABULARY)
    }

    /// Engines do not read the vocabulary's file; dflash does, and an export can hold it.
    fn pruned(&self, target: &str) -> String {
        let repo = &self.settings.repo;
        format!(
            "\nThe drafter proposes from a pruned vocabulary, `{VOCABULARY}`, which dflash reads. vLLM, \
             SGLang and Transformers would draft from all tokens, so export it for them first (vLLM; \
             `--format gguf` for llama.cpp):\n\n```sh\ndflash serve --target {target} --draft {repo}\n\
             dflash export --target {target} --draft {repo} --format speculators --output drafter\n```\n"
        )
    }

    fn engines(&self, target: &str, block: BlockShape) -> String {
        let repo = &self.settings.repo;
        let (drafts, rows) = (block.proposals(), block.rows);
        let vllm = self.at_revision(|name| format!(", \"revision\": \"{name}\""));
        let mut text = format!(
            "\nvLLM:\n\n```sh\nvllm serve {target} \\\n  --speculative-config '{{\"method\": \
             \"dflash\", \"model\": \"{repo}\"{vllm}, \"num_speculative_tokens\": {drafts}}}'\n```\n"
        );
        if suits_sglang(&self.drafter.shape) {
            let revision = self
                .at_revision(|name| format!(" \\\n  --speculative-draft-model-revision {name}"));
            write!(
                text,
                "\nSGLang:\n\n```sh\npython -m sglang.launch_server --model-path {target} \\\n  \
                 --speculative-algorithm DFLASH --speculative-draft-model-path {repo} \\\n  \
                 --speculative-num-draft-tokens {rows}{revision}\n```\n"
            )
            .expect("grows");
        }
        text
    }

    /// The argument that tells an engine the branch; empty for the main branch.
    fn at_revision(&self, argument: impl Fn(&str) -> String) -> String {
        self.settings.revision.as_deref().map_or_else(String::new, argument)
    }

    fn llama_cpp(&self, block: BlockShape) -> String {
        let repo = &self.settings.repo;
        let revision = self.at_revision(|name| format!(" --revision {name}"));
        let mut text = "\nllama.cpp, with the target as GGUF:\n\n```sh\n".to_owned();
        let mut files = self.drafter.gguf().peekable();
        let file = match files.peek() {
            Some(file) => {
                writeln!(text, "hf download {repo} {file}{revision} --local-dir .").expect("grows");
                (*file).to_owned()
            }
            // The converter reads neither the vocabulary's file nor other layouts.
            None if self.drafter.shape.layout != Layout::ZLab
                || self.is_pruned_for_dflash_alone() =>
            {
                writeln!(
                    text,
                    "# There is no GGUF file here; dflash makes one.\n\
                     dflash export --target TARGET_DIR --draft {repo} --format gguf --output \
                     drafter.gguf"
                )
                .expect("grows");
                "drafter.gguf".to_owned()
            }
            None => {
                writeln!(
                    text,
                    "# There is no GGUF file here; llama.cpp's converter makes one.\n\
                     hf download {repo}{revision} --local-dir drafter\n\
                     python convert_hf_to_gguf.py drafter --target-model-dir TARGET_DIR --outfile \
                     drafter.gguf"
                )
                .expect("grows");
                "drafter.gguf".to_owned()
            }
        };
        let drafts = block.proposals();
        write!(
            text,
            "llama-server -m target.gguf -md {file} --spec-type draft-dflash --spec-draft-n-max \
             {drafts}\n```\n"
        )
        .expect("grows");
        text
    }

    fn transformers(&self, target: &str) -> String {
        let repo = &self.settings.repo;
        let revision = self.at_revision(|name| format!(", revision=\"{name}\""));
        format!(
            "\nTransformers, with [z-lab's loop](https://github.com/z-lab/dflash):\n\n```python\n\
             from dflash.model import DFlashDraftModel, dflash_generate\n\
             from transformers import AutoModelForCausalLM, AutoTokenizer\n\n\
             target = AutoModelForCausalLM.from_pretrained(\"{target}\", dtype=\"auto\").eval()\n\
             draft = DFlashDraftModel.from_pretrained(\n    \"{repo}\", dtype=target.dtype{revision}).eval()\n\
             tokenizer = AutoTokenizer.from_pretrained(\"{target}\")\n\
             messages = [{{\"role\": \"user\", \"content\": \"What is 17 times 23?\"}}]\n\
             ids = tokenizer.apply_chat_template(\n    messages, add_generation_prompt=True, \
             return_tensors=\"pt\", return_dict=False)\n\
             output = dflash_generate(\n    draft, target, ids, max_new_tokens=256, temperature=0.0,\n    \
             stop_token_ids=[tokenizer.eos_token_id])\n\
             print(tokenizer.decode(output[0, ids.shape[1]:], skip_special_tokens=True))\n```\n"
        )
    }
}
