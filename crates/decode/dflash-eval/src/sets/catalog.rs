//! The ten sets of the DFlash paper: their repositories and the wording of their questions.
//!
//! Repositories, splits and wording are those of the authors' published benchmark client
//! (github.com/z-lab/dflash: dflash/benchmark.py; of the five sets that a later release of it
//! dropped, model/utils.py of the first). The counts are those of their runs: 128 questions, or all
//! of smaller sets.

use serde_json::{Map, Value, json};

/// Added to every mathematical question.
const STEP_BY_STEP: &str =
    "\nPlease reason step by step, and put your final answer within \\boxed{}.";
/// Default number of questions of a larger set.
const QUESTIONS: usize = 128;

/// A benchmark set.
#[derive(Debug, PartialEq, Eq)]
pub struct NamedSet {
    /// Its name on the command line.
    pub name: &'static str,
    /// Another spelling.
    alias: &'static str,
    /// Its name in tables.
    pub title: &'static str,
    /// `OWNER/NAME` on the Hub.
    pub repo: &'static str,
    pub(crate) place: SetLocation,
    /// Default number of rows.
    pub(crate) limit: Option<usize>,
    pub(crate) question: Question,
}

/// Where a set is in its repository.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SetLocation {
    /// Configuration and split of the Hub's Parquet conversion.
    Split(&'static str, &'static str),
    /// JSONL files, of which only as many are fetched as are needed.
    Files(&'static [&'static str]),
}

/// How a row becomes a question.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Question {
    /// The text of a field between two others.
    Around(&'static str, &'static str, &'static str),
    /// A field that holds the turns.
    Turns(&'static str),
    /// Alpaca's instruction, with its input if it has one.
    Instruction,
    /// LiveCodeBench's question, with its starter code if it has some.
    Program,
}

/// The sets, in the order of the paper's table.
pub const SETS: [NamedSet; 10] = [
    NamedSet {
        name: "gsm8k",
        alias: "gsm-8k",
        title: "GSM8K",
        repo: "openai/gsm8k",
        place: SetLocation::Split("main", "test"),
        limit: Some(QUESTIONS),
        question: Question::Around("", "question", STEP_BY_STEP),
    },
    NamedSet {
        name: "math500",
        alias: "math-500",
        title: "MATH-500",
        repo: "HuggingFaceH4/MATH-500",
        place: SetLocation::Split("default", "test"),
        limit: Some(QUESTIONS),
        question: Question::Around("", "problem", STEP_BY_STEP),
    },
    NamedSet {
        name: "aime24",
        alias: "aime-24",
        title: "AIME24",
        repo: "HuggingFaceH4/aime_2024",
        place: SetLocation::Split("default", "train"),
        limit: None,
        question: Question::Around("", "problem", STEP_BY_STEP),
    },
    NamedSet {
        name: "aime25",
        alias: "aime-25",
        title: "AIME25",
        repo: "MathArena/aime_2025",
        place: SetLocation::Split("default", "train"),
        limit: None,
        question: Question::Around("", "problem", STEP_BY_STEP),
    },
    NamedSet {
        name: "humaneval",
        alias: "human-eval",
        title: "HumanEval",
        repo: "openai/openai_humaneval",
        place: SetLocation::Split("openai_humaneval", "test"),
        limit: None,
        question: Question::Around(
            "Write a solution to the following problem and make sure that it passes the tests:\n\
             ```python\n",
            "prompt",
            "\n```",
        ),
    },
    NamedSet {
        name: "mbpp",
        alias: "mbpp-sanitized",
        title: "MBPP",
        repo: "google-research-datasets/mbpp",
        place: SetLocation::Split("sanitized", "test"),
        limit: Some(QUESTIONS),
        question: Question::Around("", "prompt", ""),
    },
    NamedSet {
        name: "livecodebench",
        alias: "live-code-bench",
        title: "LiveCodeBench",
        repo: "livecodebench/code_generation_lite",
        place: SetLocation::Files(&[
            "test.jsonl",
            "test2.jsonl",
            "test3.jsonl",
            "test4.jsonl",
            "test5.jsonl",
            "test6.jsonl",
        ]),
        limit: Some(QUESTIONS),
        question: Question::Program,
    },
    NamedSet {
        name: "swe-bench",
        alias: "swe_bench",
        title: "SWE-Bench",
        repo: "princeton-nlp/SWE-bench_Lite",
        place: SetLocation::Split("default", "test"),
        limit: Some(QUESTIONS),
        question: Question::Around(
            "Problem Statement:\n",
            "problem_statement",
            "\nPlease fix the issue described above.",
        ),
    },
    NamedSet {
        name: "mt_bench",
        alias: "mt-bench",
        title: "MT-Bench",
        repo: "HuggingFaceH4/mt_bench_prompts",
        place: SetLocation::Split("default", "train"),
        limit: None,
        question: Question::Turns("prompt"),
    },
    NamedSet {
        name: "alpaca",
        alias: "alpaca-52k",
        title: "Alpaca",
        repo: "tatsu-lab/alpaca",
        place: SetLocation::Split("default", "train"),
        limit: Some(QUESTIONS),
        question: Question::Instruction,
    },
];

impl NamedSet {
    /// The set of a name, in either spelling.
    pub(crate) fn find(name: &str) -> Option<&'static Self> {
        SETS.iter().find(|set| set.name == name || set.alias == name)
    }

    /// The turns of a row, or the name of a missing field.
    pub(crate) fn turns(&self, row: &Map<String, Value>) -> Result<Value, &'static str> {
        let text = |field: &'static str| row.get(field).and_then(Value::as_str).ok_or(field);
        let asked = match self.question {
            Question::Around(before, field, after) => format!("{before}{}{after}", text(field)?),
            Question::Turns(field) => {
                let turns = row.get(field).filter(|turns| turns.is_array()).ok_or(field)?;
                return Ok(turns.clone());
            }
            Question::Instruction => match text("input").unwrap_or_default() {
                "" => text("instruction")?.to_owned(),
                input => format!("{}\n\nInput:\n{input}", text("instruction")?),
            },
            Question::Program => {
                let starter = text("starter_code").unwrap_or_default();
                program(text("question_content")?, starter)
            }
        };
        Ok(json!([asked]))
    }
}

/// LiveCodeBench's own wording, in one turn as in the authors' client.
fn program(question: &str, starter: &str) -> String {
    let (format, code) = match starter {
        "" => ("Write your code in the following format:", "# YOUR CODE HERE"),
        starter => ("Use the following code structure:", starter),
    };
    format!(
        "You are an expert Python programmer. You will be given a question (problem specification) \
         and will generate a correct Python program that matches the specification and passes all \
         tests. You will NOT return anything except for the program\n\n\
         ### Question:\n{question}\n\n### Format: {format}\n```python\n{code}\n```\n\n\
         ### Answer: (use the provided format with backticks)"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(name: &str, row: Value, expect: &Value) {
        let set = NamedSet::find(name).unwrap();
        assert_eq!(set.turns(row.as_object().unwrap()).as_ref(), Ok(expect), "{name}");
    }

    #[test]
    fn questions_are_put_as_the_authors_put_them() {
        let steps = "Please reason step by step, and put your final answer within \\boxed{}.";
        check("gsm8k", json!({"question": "1+1?"}), &json!([format!("1+1?\n{steps}")]));
        for name in ["math500", "aime24", "aime25", "math-500"] {
            check(name, json!({"problem": "x?"}), &json!([format!("x?\n{steps}")]));
        }
        check(
            "humaneval",
            json!({"prompt": "def f():\n"}),
            &json!([
                "Write a solution to the following problem and make sure that it passes the tests:\
                 \n```python\ndef f():\n\n```"
            ]),
        );
        check("mbpp", json!({"prompt": "Write f."}), &json!(["Write f."]));
        check(
            "swe-bench",
            json!({"problem_statement": "It fails."}),
            &json!(["Problem Statement:\nIt fails.\nPlease fix the issue described above."]),
        );
        check("mt_bench", json!({"prompt": ["a", "b"]}), &json!(["a", "b"]));
        let alpaca = json!({"instruction": "Sort.", "input": "3 1", "output": "1 3"});
        check("alpaca", alpaca, &json!(["Sort.\n\nInput:\n3 1"]));
        check("alpaca", json!({"instruction": "Hi.", "input": ""}), &json!(["Hi."]));
        let program = |starter: &str| {
            let row = json!({"question_content": "Add.", "starter_code": starter});
            let set = NamedSet::find("livecodebench").unwrap();
            set.turns(row.as_object().unwrap()).unwrap()[0].as_str().unwrap().to_owned()
        };
        assert!(program("").ends_with(
            "the program\n\n### Question:\nAdd.\n\n### Format: Write your code in the following \
             format:\n```python\n# YOUR CODE HERE\n```\n\n### Answer: (use the provided format with \
             backticks)"
        ));
        assert!(program("class S:").contains(
            "### Format: Use the following code structure:\n```python\nclass S:\n```\n\n"
        ));
    }

    #[test]
    fn a_missing_field_is_named() {
        let turns = |name: &str| NamedSet::find(name).unwrap().turns(&Map::new());
        assert_eq!(turns("gsm8k"), Err("question"));
        assert_eq!(turns("mt_bench"), Err("prompt"));
        assert_eq!(turns("alpaca"), Err("instruction"));
        assert_eq!(turns("livecodebench"), Err("question_content"));
    }

    #[test]
    fn names_are_the_tables_and_no_two_alike() {
        let titles = SETS.each_ref().map(|set| set.title);
        let paper = [
            "GSM8K",
            "MATH-500",
            "AIME24",
            "AIME25",
            "HumanEval",
            "MBPP",
            "LiveCodeBench",
            "SWE-Bench",
            "MT-Bench",
            "Alpaca",
        ];
        assert_eq!(titles, paper);
        for set in &SETS {
            assert_eq!(NamedSet::find(set.name), NamedSet::find(set.alias));
            assert!(set.repo.contains('/'));
        }
        assert_eq!(NamedSet::find("gsm9k"), None);
    }
}
