//! The program accepts every dflash command line shown in the documentation.

use std::fs;
use std::path::{Path, PathBuf};

use clap::error::ErrorKind;
use dflash::cli::definition;

/// Markdown files below `dir`.
fn pages(dir: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
    let below = entries.flat_map(|path| if path.is_dir() { pages(&path) } else { vec![path] });
    below.filter(|path| path.extension().is_some_and(|ending| ending == "md")).collect()
}

/// The lines of a page's shell blocks, with continued ones joined, without comments.
fn shell_lines(text: &str) -> Vec<String> {
    let mut shell = false;
    let mut lines = vec![String::new()];
    for line in text.lines() {
        if line.starts_with("```") {
            shell = line == "```sh";
            continue;
        }
        if !shell {
            continue;
        }
        let line = line.split(" #").next().unwrap_or(line);
        let last = lines.last_mut().expect("one line at least");
        match line.strip_suffix('\\') {
            Some(start) => last.push_str(start),
            None => {
                last.push_str(line);
                lines.push(String::new());
            }
        }
    }
    lines
}

/// The arguments after `dflash`, up to the end of the command; `None` if it is not one of ours.
/// Variables are replaced by 1.
fn arguments(line: &str) -> Option<Vec<String>> {
    let mut words = words(line).into_iter().skip_while(|word| {
        let (name, value) = word.split_once('=').unwrap_or(("", ""));
        !name.is_empty()
            && name.chars().all(|c| c.is_ascii_uppercase() || c == '_')
            && !value.is_empty()
    });
    if words.next()? != "dflash" {
        return None;
    }
    let ends = ["&", "|", "&&", "||", ";", ">", "2>", "<"];
    Some(words.take_while(|word| !ends.contains(&word.as_str())).collect())
}

fn words(line: &str) -> Vec<String> {
    let mut words = vec![];
    let (mut word, mut quote, mut started) = (String::new(), None, false);
    let mut letters = line.chars().peekable();
    while let Some(letter) = letters.next() {
        match letter {
            '"' | '\'' if quote.is_none() => (quote, started) = (Some(letter), true),
            _ if quote == Some(letter) => quote = None,
            '$' if quote != Some('\'') => {
                while letters.next_if(|c| c.is_alphanumeric() || "_{}".contains(*c)).is_some() {}
                word.push('1');
                started = true;
            }
            ' ' if quote.is_none() => {
                if started {
                    words.push(std::mem::take(&mut word));
                }
                started = false;
            }
            _ => {
                word.push(letter);
                started = true;
            }
        }
    }
    if started {
        words.push(word);
    }
    words
}

/// Why the program rejects a line. A line with `...` or with a run file need not be complete; the
/// server's target may be given in place of a run file.
fn fault(line: &str) -> Option<String> {
    let arguments = arguments(line)?;
    let others = ["...", "hidden-server"];
    let incomplete =
        arguments.iter().any(|word| others.contains(&word.as_str()) || word.ends_with(".toml"));
    let words = arguments.into_iter().filter(|word| word != "...");
    let error =
        definition().try_get_matches_from(["dflash".to_owned()].into_iter().chain(words)).err()?;
    let fine = match error.kind() {
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => true,
        ErrorKind::MissingRequiredArgument => incomplete,
        _ => false,
    };
    (!fine).then(|| format!("{line}\n{error}"))
}

#[test]
fn the_program_takes_every_command_of_the_pages() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../..");
    let mut pages = pages(&root.join("docs"));
    pages.extend([root.join("README.md"), root.join("recipes/README.md")]);
    let mut seen = 0;
    for page in pages {
        for line in shell_lines(&fs::read_to_string(&page).unwrap()) {
            seen += usize::from(arguments(&line).is_some());
            if let Some(fault) = fault(&line) {
                panic!("{}: {fault}", page.display());
            }
        }
    }
    assert!(seen > 30, "only {seen} commands were found");
}

#[test]
fn lines_are_read_as_a_shell_reads_them() {
    let page = "```sh\nX=1 dflash eval --target \"$T/a b\" \\\n  --draft 'd' | tail  # so\n```\n```toml\ndflash x\n```\n";
    let lines = shell_lines(page);
    assert_eq!(lines.len(), 2, "{lines:?}");
    let expected = ["eval", "--target", "1/a b", "--draft", "d"];
    assert_eq!(arguments(&lines[0]).unwrap(), expected);
    assert!(fault("dflash eval --target t --draft d --prompts p").is_none());
    assert!(fault("dflash eval --target t ...").is_none());
    assert!(fault("dflash eval --target t").is_some());
    assert!(fault("dflash eval --tarjet t ...").is_some());
    assert!(fault("vllm serve --anything").is_none());
}
