//! Report pages of runs in every state: finished, in progress, resumed, with a truncated last line.

use std::path::Path;

use dflash_report::write_report;

/// The page of a directory with these files.
fn page(files: &[(&str, &str)]) -> Result<String, String> {
    let dir = tempfile::tempdir().unwrap();
    for (name, text) in files {
        let path = dir.path().join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    }
    let path = write_report(dir.path(), None).map_err(|error| error.to_string())?;
    assert_eq!(path, dir.path().join("report.html"));
    Ok(std::fs::read_to_string(path).unwrap())
}

fn line(step: u64, loss: f64) -> String {
    format!(
        "{{\"step\":{step},\"loss\":{loss},\"accuracy\":0.5,\"accuracy_by_slot\":[null,0.6,0.4],\
         \"expected_acceptance_length\":2.5,\"lr\":0.001,\"gradient_norm\":1.5,\"slots_per_s\":900.0,\
         \"tokens_per_s\":80.0,\"data_wait_s\":1.0,\"interval_s\":4.0,\"peak_memory_mib\":512.0,\
         \"stream\":{{\"requests\":70,\"retries\":12}}}}\n"
    )
}

fn figures(page: &str) -> usize {
    page.matches("<figure ").count()
}

#[test]
fn a_run_shows_its_curves_settings_and_checkpoints() {
    let metrics: String = (1..=50).map(|n| line(n * 10, 8.0 / n as f64)).collect();
    let validation = concat!(
        "{\"step\":100,\"loss\":3.1,\"accuracy\":0.4,\"blocks\":80}\n",
        "{\"step\":500,\"loss\":2.9,\"expected_acceptance_length\":2.2,\"blocks\":80,",
        "\"acceptance_length\":2.75,\"acceptance_length_per_response\":2.9,\"responses\":8}\n",
    );
    let run = r#"{"dflash": "0.1.0", "world_size": 4, "resumed_at_step": 60,
        "earlier_starts": [{"resumed_at_step": 0}, {"resumed_at_step": 30}],
        "config": {"lr": 0.0006, "draft": {"block_size": 16}, "command": ["dflash", "train"]}}"#;
    let page = page(&[
        ("metrics.jsonl", &metrics),
        ("validation.jsonl", validation),
        ("run.json", run),
        ("step-000500/config.json", "{}"),
        ("step-000500/trainer/state.json", "{\"step\": 500}"),
        ("step-broken/config.json", "{}"),
        ("step-000700/model.safetensors", "not complete without a config.json"),
    ])
    .unwrap();
    // Three of learning, one of slots, six of speed: these lines lack TFLOP/s and MFU.
    assert_eq!(figures(&page), 10);
    assert_eq!(page.matches("<svg").count(), figures(&page));
    for text in [
        "<p class=\"lede\">Stopped at step 500: acceptance length 2.75 of at most 16 tokens, \
         measured on 8 prompts at step 500; 1 remark.</p>",
        "<h3>Loss <span class=\"unit\">nats</span></h3>",
        "<li class=\"c3\">measured, over steps</li>",
        "<th scope=\"row\">world_size</th><td>4</td>",
        "<th scope=\"row\">config.draft.block_size</th><td>16</td>",
        "<code class=\"command\">dflash train</code>",
        "Resumed 2 times, at step 30, 60.",
        "<th scope=\"row\" class=\"keep\">step-000500</th>",
        "<th scope=\"row\">requests retried</th><td class=\"n\">12</td>",
        "<summary>9 counts at zero</summary>",
        "<dt>Waiting for data</dt><dd>25%",
    ] {
        assert!(page.contains(text), "{text} in\n{page}");
    }
    assert!(!page.contains("step-000700") && !page.contains("step-broken"));
    // A quarter of the time goes by waiting for data, which is no fault.
    assert!(!page.contains("alert fault"));
}

#[test]
fn the_page_needs_nothing_from_elsewhere() {
    let page = page(&[("metrics.jsonl", &(line(1, 2.0) + &line(2, 1.0)))]).unwrap();
    for reference in ["src=", "@import", "url(", "http://", "https://", "style=", "onclick"] {
        assert!(!page.contains(reference), "{reference} in\n{page}");
    }
    assert!(page.contains("default-src &#39;none&#39;") || page.contains("default-src 'none'"));
    // To a part of the page itself, and the icon that is none.
    assert_eq!(page.matches("href=").count(), 2);
    assert_eq!(page.matches("<script>").count(), 1);
}

#[test]
fn later_lines_win_and_broken_ones_are_counted() {
    let metrics = line(10, 5.0) + &line(20, 4.0) + &line(10, 3.5) + "{\"step\": 30, \"lo";
    let page = page(&[("metrics.jsonl", &metrics)]).unwrap();
    assert!(page.contains("metrics.jsonl: 1 broken line was left out"), "{page}");
    assert!(page.contains("run.json is missing or broken"), "{page}");
    assert!(page.contains("Stopped at step 20") && page.contains("2 faults."), "{page}");
    assert!(page.contains("data-values=\"10,3.5,"), "{page}");
}

#[test]
fn what_comes_from_files_is_escaped() {
    let run = r#"{"config": {"command": ["<script>alert(1)</script>"], "a\"b": "x & <b>"}}"#;
    let page = page(&[("run.json", run)]).unwrap();
    assert!(page.contains("&lt;script&gt;alert(1)&lt;/script&gt;"), "{page}");
    assert!(
        page.contains("<th scope=\"row\">config.a&quot;b</th><td>x &amp; &lt;b&gt;</td>"),
        "{page}"
    );
    assert_eq!(page.matches("<script").count(), 1, "{page}");
    assert!(page.contains("first line of metrics") && page.contains("None yet"), "{page}");
}

#[test]
fn runs_without_numbers_and_directories_without_runs() {
    let nan = "{\"step\": 1, \"loss\": null, \"gradient_norm\": null, \"accuracy_by_slot\": []}\n";
    assert_eq!(figures(&page(&[("metrics.jsonl", nan)]).unwrap()), 0);
    let error = page(&[("notes.txt", "")]).unwrap_err();
    assert!(error.contains("neither metrics.jsonl nor run.json"), "{error}");
    let error = write_report(Path::new("/nonexistent/run"), None).unwrap_err().to_string();
    assert!(error.contains("/nonexistent/run is not the directory of a run"), "{error}");
}

#[test]
fn the_page_goes_where_it_is_asked_for() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("metrics.jsonl"), line(1, 1.0)).unwrap();
    let output = dir.path().join("page.html");
    assert_eq!(write_report(dir.path(), Some(&output)).unwrap(), output);
    assert!(output.is_file() && !dir.path().join("report.html").exists());
}
