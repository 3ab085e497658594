"""What the numbers on the page mean: name, formula, words."""

from __future__ import annotations

# a[i][j]: accuracy on task j after learning task i; T tasks, numbered 0 to T-1.
GLOSSARY: tuple[tuple[str, str, str], ...] = (
    (
        "a(i, j)",
        "",
        "Accuracy on the test images of task j after task i was learned, in percent. "
        "The answer is one of all classes seen so far; the model is not told the task.",
    ),
    (
        "AA",
        "Σⱼ nⱼ a(T−1, j) / Σⱼ nⱼ",
        "Average accuracy over all tasks after the last one. nⱼ: test images of task j; domains count equally.",
    ),
    (
        "AIA",
        "(1/T) Σᵢ Aᵢ",
        "Average incremental accuracy. Aᵢ is the accuracy over everything seen after task i.",
    ),
    (
        "Old, recent",
        "mean of a(T−1, j) over j < ⌊T/2⌋, over j ≥ ⌊T/2⌋",
        "Final accuracy on the first ⌊T/2⌋ tasks and on the rest, the split of the paper.",
    ),
    (
        "Forgetting",
        "mean over j < T−1 of maxᵢ a(i, j) − a(T−1, j)",
        "Points each task but the last has lost since its best moment; 0 is best.",
    ),
    (
        "BWT",
        "mean over j < T−1 of a(T−1, j) − a(j, j)",
        "Backward transfer: what later tasks did to earlier ones. Negative means forgetting.",
    ),
    (
        "Within-task accuracy",
        "",
        "Accuracy when the choice is only among the classes of the image's own task. "
        "What separates it from AA is lost between tasks, what separates it from 100 inside them.",
    ),
    (
        "Upload per site and round",
        "bytes sent up / participations",
        "Counted on what was really sent, tensors as they are. 1 MB is 10⁶ bytes.",
    ),
    (
        "Nominal cost",
        "",
        "What the paper's formulas give for this setting: all classes present, labels not counted.",
    ),
    (
        "Nearest real image",
        "",
        "For an uploaded image, the real training image with the smallest root-mean-square pixel difference (RMS).",
    ),
    (
        "PSNR",
        "10 log₁₀(peak² / mean squared difference)",
        "Likeness of two images in decibel. An upload above 30 dB counts as a near-copy: "
        "to most people such a pair looks the same.",
    ),
    (
        "Traced",
        "",
        "An upload whose nearest training image is much nearer than the nearest image that no site had, after mirror, small moves, "
        "negative, contrast and blur are undone. Beside it stands the same share for images that nobody sent: chance.",
    ),
    ("±", "√(Σ(x − x̄)² / (n−1))", "Standard deviation over n seeds; none is shown for one seed."),
)
