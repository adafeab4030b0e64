//! Quantities as people read them.

/// Seconds with at most two units.
pub fn duration(seconds: f64) -> String {
    let whole = seconds.max(0.0).round() as u64;
    match whole {
        0..10 if whole < 9 => format!("{:.1} s", seconds.max(0.0)),
        0..60 => format!("{whole} s"),
        60..3600 => format!("{} min {} s", whole / 60, whole % 60),
        3600..86_400 => format!("{} h {} min", whole / 3600, whole / 60 % 60),
        _ => format!("{} d {} h", whole / 86_400, whole / 3600 % 24),
    }
}

/// Bytes in the unit that leaves one to four digits before the point.
pub fn bytes(bytes: f64) -> String {
    let units = ["B", "KiB", "MiB", "GiB"];
    let (mut value, mut unit) = (bytes, 0);
    while value >= 1024.0 && unit + 1 < units.len() {
        value /= 1024.0;
        unit += 1;
    }
    match value {
        _ if unit == 0 => format!("{value:.0} B"),
        ..100.0 => format!("{value:.1} {}", units[unit]),
        _ => format!("{value:.0} {}", units[unit]),
    }
}

/// A share in per cent.
pub fn percent(share: f64) -> String {
    match 100.0 * share {
        0.0 => "0%".to_owned(),
        small @ ..0.05 if small > 0.0 => "less than 0.1%".to_owned(),
        percent if percent.abs() < 9.95 => format!("{percent:.1}%"),
        percent => format!("{percent:.0}%"),
    }
}

/// A count with its digits in groups of three.
pub fn count(count: u64) -> String {
    let digits = count.to_string();
    let mut text = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// A count of things: `1 step`, `2 steps`.
pub fn counted(number: u64, one: &str, many: &str) -> String {
    format!("{} {}", count(number), if number == 1 { one } else { many })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantities_have_the_digits_that_mean_something() {
        let texts = [0.0, 3.42, 42.4, 62.0, 3600.0, 90_061.0].map(duration);
        assert_eq!(texts, ["0.0 s", "3.4 s", "42 s", "1 min 2 s", "1 h 0 min", "1 d 1 h"]);
        let texts = [9.0, 2048.0, 150.0 * 1_048_576.0, 3.0 * 1_073_741_824.0].map(bytes);
        assert_eq!(texts, ["9 B", "2.0 KiB", "150 MiB", "3.0 GiB"]);
        let texts = [0.0, 0.0001, 0.0123, 0.5, 1.0].map(percent);
        assert_eq!(texts, ["0%", "less than 0.1%", "1.2%", "50%", "100%"]);
        assert_eq!([7, 1234, 1_234_567].map(count), ["7", "1,234", "1,234,567"]);
        assert_eq!(counted(1, "step", "steps") + &counted(0, "x", "xs"), "1 step0 xs");
    }
}
