"""A study written in a real browser: words that are offered, problems with their lines, the plan, and the file."""

import shutil

import pytest

from archlab.search.store.notes import Note, read_notes
from archlab.search.store.store import Store

pytestmark = [pytest.mark.browser, pytest.mark.slow]


SOON_MS = 60_000


def test_a_study_is_written_with_the_keyboard(store, served, visit, tmp_path, monkeypatch):
    shutil.copytree(store, tmp_path / ".archlab")
    monkeypatch.chdir(tmp_path)
    page = visit.page
    page.set_default_timeout(SOON_MS)
    page.goto(f"{served(tmp_path / '.archlab')}/write")
    page.wait_for_selector("#write-found >> text=nothing was trained")
    page.locator("#write-file").fill("mine.yaml")
    area = page.locator(".code textarea")
    area.fill("study: mine\nmodel:\n  d_model: 64\n  n_layers: 2\n  block:")
    area.press("End")
    area.press("Enter")
    area.type("no")
    page.wait_for_selector(".completions [role=option] >> text=norm")
    area.press("Enter")
    area.type("rms")
    page.wait_for_selector(".completions [role=option] >> text=rmsnorm")
    area.press("Tab")
    assert area.input_value().endswith("\n  block:\n    norm: rmsnorm"), "it is indented, and taken with its colon"
    area.type("\nattention: {heads: 3}\nffn: glu\n")
    area.evaluate("area => area.setSelectionRange(area.value.length, area.value.length)")
    page.wait_for_selector("#write-found >> text=problem")
    page.locator(".to-line").first.click()
    assert page.evaluate("document.activeElement.tagName") == "TEXTAREA"
    assert page.locator("#write-run").is_disabled() and page.locator(".code-lines .wrong").count()
    text = area.input_value().rstrip() + "\nvariants: {baseline: {}}\ntrain: {tokens: 10k, lr: 1e-3}\n"
    area.fill("\n".join(line for line in text.replace("heads: 3", "heads: 4").split("\n")))
    page.wait_for_selector("#write-found >> text=nothing was trained")
    page.click("#write-save")
    page.wait_for_selector("#write-said >> text=Saved as")
    assert (tmp_path / "mine.yaml").read_text() == area.input_value()
    (tmp_path / "mine.yaml").write_text("study: another hand\n")
    page.locator("#write-save").click()
    page.wait_for_selector("#write-said >> text=has changed on disk")
    assert (tmp_path / "mine.yaml").read_text() == "study: another hand\n"


def test_what_was_typed_and_not_saved_is_there_again(store, served, visit, tmp_path, monkeypatch):
    shutil.copytree(store, tmp_path / ".archlab")
    monkeypatch.chdir(tmp_path)
    page = visit.page
    page.set_default_timeout(SOON_MS)
    start = served(tmp_path / ".archlab")
    page.goto(f"{start}/write")
    area = page.locator(".code textarea")
    page.wait_for_selector("#write-found >> text=nothing was trained")
    assert page.locator(".draft").is_hidden()
    template = area.input_value()
    page.locator("#write-file").fill("mine.yaml")
    area.fill("study: mine\n")
    page.wait_for_selector("#write-found >> text=problem")
    page.click("text=Studies")
    page.wait_for_selector("text=Where should attention be gated?")
    page.go_back()
    page.wait_for_selector("text=which was not saved yet")
    assert area.input_value() == "study: mine\n" and page.locator("#write-file").input_value() == "mine.yaml"
    page.wait_for_selector("#write-found >> text=problem")
    page.click("#write-save")
    page.wait_for_selector("#write-said >> text=Saved as")
    page.reload()
    page.wait_for_selector("#write-found >> text=nothing was trained")
    assert area.input_value() == template, "what was saved is no draft"
    page.goto(f"{start}/write?file=mine.yaml")
    page.wait_for_selector("#write-found >> text=problem")
    area.fill("study: mine\n# more\n")
    (tmp_path / "mine.yaml").write_text("study: another hand\n")
    page.reload()
    page.wait_for_selector("text=which was not saved yet")
    page.click("#write-save")
    page.wait_for_selector("#write-said >> text=has changed on disk")
    assert (tmp_path / "mine.yaml").read_text() == "study: another hand\n"
    page.goto(f"{start}/write")
    page.wait_for_selector("#write-found >> text=nothing was trained")
    area.fill("study: other\n")
    page.reload()
    page.wait_for_selector("text=which was not saved yet")
    page.click("text=Drop it")
    page.wait_for_selector("#write-found >> text=nothing was trained")
    assert area.input_value() == template


def test_a_note_is_kept_and_found_again(store, served, visit, tmp_path):
    shutil.copytree(store, tmp_path / ".archlab")
    start, page = served(tmp_path / ".archlab"), visit.page
    page.set_default_timeout(SOON_MS)
    page.goto(f"{start}/study/gate-position")
    page.get_by_label("Note").fill("It <b>holds</b>.")
    page.locator(".note .mantine-TagsInput-inputField").fill("paper")
    page.keyboard.press("Enter")
    page.wait_for_selector("text=Kept.")
    with Store.open(tmp_path / ".archlab", create=False) as kept:  # the text is sent when none was typed for a while
        while read_notes(kept).studies.get("gate-position") != Note("It <b>holds</b>.", ("paper",)):
            page.wait_for_timeout(100)
    page.goto(f"{start}/")
    page.wait_for_selector(".tag >> text=paper")
    page.fill("#studies-search", "holds")
    page.wait_for_function("document.querySelectorAll('.study-card').length == 1")
    page.click(".study-card")
    page.wait_for_selector("text=G1 is better than baseline")
    assert page.get_by_label("Note").input_value() == "It <b>holds</b>."


def test_rows_are_pinned_hidden_and_compared(address, visit):
    page = visit.page
    page.set_default_timeout(SOON_MS)
    page.goto(f"{address}/study/gate-position/table")
    page.wait_for_selector("#ablation .ag-row")
    names = "[...document.querySelectorAll('#ablation .ag-pinned-left-cols-container .ag-row')]"
    order = "sort((a, b) => a.getAttribute('row-index') - b.getAttribute('row-index'))"
    ids = f"{names}.{order}.map(row => row.getAttribute('row-id'))"

    def tick(*rows):
        for row in rows:
            page.locator(f'#ablation .ag-row[row-id="{row}"] .ag-checkbox-input').check()

    tick("G2", "G4")
    page.click("#ablation-pin")
    page.wait_for_function(f"{ids}.slice(0, 2).join() == 'G2,G4'")
    tick("baseline", "G5")
    page.click("#ablation-hide")
    page.wait_for_function(f"{names}.length == 4 && location.search.endsWith('hide=G5')")
    link = page.url
    page.goto("about:blank")
    page.goto(link)
    page.wait_for_function(f"{names}.length == 4 && {ids}[0] == 'G2'")
    assert "hide=baseline&hide=G5" in page.get_attribute("#ablation-files a >> nth=0", "href")
    page.click("#ablation-unhide")
    page.wait_for_function(f"{names}.length == 6")
    tick("G1", "G3")
    page.click("#ablation-compare")
    page.wait_for_selector("text=Differences to G1")
    page.wait_for_selector("text=all 15 pairs of the table")
