//! Owners of well-known models on the Hub, for names that were given without one.

use crate::name::is_repository;

/// How the models of a family are called, in lower case, and who publishes them: the families that can be
/// targets (docs/targets.md), the longer beginnings first.
const OWNERS: [(&str, &str); 35] = [
    ("qwen", "Qwen"),
    ("qwq", "Qwen"),
    ("meta-llama-", "meta-llama"),
    ("llama-", "meta-llama"),
    ("codellama-", "meta-llama"),
    ("tinyllama", "TinyLlama"),
    ("gemma-", "google"),
    ("mistral-", "mistralai"),
    ("mixtral-", "mistralai"),
    ("ministral-", "mistralai"),
    ("codestral-", "mistralai"),
    ("devstral-", "mistralai"),
    ("magistral-", "mistralai"),
    ("gpt-oss", "openai"),
    ("phi-", "microsoft"),
    ("smollm", "HuggingFaceTB"),
    ("deepseek-", "deepseek-ai"),
    ("glm-", "zai-org"),
    ("kimi-", "moonshotai"),
    ("olmo", "allenai"),
    ("granite-", "ibm-granite"),
    ("minimax-", "MiniMaxAI"),
    ("falcon", "tiiuae"),
    ("ernie-", "baidu"),
    ("lfm2", "LiquidAI"),
    ("seed-oss", "ByteDance-Seed"),
    ("hunyuan-", "tencent"),
    ("hy-", "tencent"),
    ("exaone-", "LGAI-EXAONE"),
    ("internlm", "internlm"),
    ("stablelm-", "stabilityai"),
    ("nvidia-nemotron", "nvidia"),
    ("step-", "stepfun-ai"),
    ("mimo-", "XiaomiMiMo"),
    ("yi-", "01-ai"),
];

/// `OWNER/NAME` for a name without its owner, if its family is known.
pub(crate) fn with_owner(name: &str) -> Option<String> {
    let lower = name.to_lowercase();
    let whole = |owner: &str| Some(format!("{owner}/{name}")).filter(|whole| is_repository(whole));
    // A drafter is named after its target.
    if lower.contains("-dflash") {
        return whole("z-lab");
    }
    let (_, owner) = OWNERS.iter().find(|(start, _)| lower.starts_with(start))?;
    whole(owner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_known_families_get_their_owner() {
        let check = |name: &str, expect: Option<&str>| {
            assert_eq!(with_owner(name).as_deref(), expect, "{name}");
        };
        check("Qwen3-8B", Some("Qwen/Qwen3-8B"));
        check("Llama-3.1-8B-Instruct", Some("meta-llama/Llama-3.1-8B-Instruct"));
        check("gpt-oss-20b", Some("openai/gpt-oss-20b"));
        check("Qwen3-8B-DFlash-b16", Some("z-lab/Qwen3-8B-DFlash-b16"));
        check("Qwen3-8B@main", Some("Qwen/Qwen3-8B@main"));
        for other in ["./Qwen3-8B", "Qwen/Qwen3-8B", "qwen 3", "my-model", "Qwen3-8B/"] {
            check(other, None);
        }
    }
}
