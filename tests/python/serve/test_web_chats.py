"""Tests of the chats that the browser keeps: list, versions, files, export, and a full browser."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from web_tab import CHAT, answer_with, chunk, stored_chats

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
expect = playwright.expect

PUT = """(chat) => new Promise((resolve) => {
  indexedDB.open("lmdeploy", 1).onsuccess = ({ target }) => {
    target.result.transaction("chats", "readwrite").objectStore("chats").put(chat).onsuccess =
      resolve;
  };
})"""


def answers(tab: Any) -> Any:
    return tab.page.locator(".answer .rendered")


def action(tab: Any, name: str) -> Any:
    return tab.page.locator("#chat-list .actions button").filter(has_text=name)


def versions(tab: Any) -> list[str]:
    return tab.texts(".versions span")


def downloaded(tab: Any, name: str) -> tuple[str, str]:
    """Return the name and the text of the file that a button saves."""
    with tab.page.expect_download() as found:
        action(tab, name).click()
    return found.value.suggested_filename, Path(found.value.path()).read_text("utf-8")


def test_chats_are_listed_opened_and_kept(open_tab: Any, fake: str) -> None:
    tab = open_tab(fake)
    tab.ask("first\nsecond line")
    tab.page.click("#new-chat")
    expect(tab.page.locator(".message")).to_have_count(0)
    expect(tab.page.locator("#context")).to_have_text("0 of 4,096 tokens")
    tab.ask("other")
    titles = tab.page.locator("#chat-list .chat")
    expect(titles).to_have_text(["other", "first"])
    titles.nth(1).click()
    expect(answers(tab)).to_have_text("You said: FIRST")
    expect(titles.nth(1)).to_have_attribute("aria-current", "true")
    expect(tab.page.locator("#prompt")).to_be_focused()
    tab.page.reload()
    expect(answers(tab)).to_have_text("You said: FIRST")
    tab.page.evaluate("sessionStorage.clear()")  # as in a new tab
    tab.page.reload()
    expect(titles).to_have_text(["other", "first"])
    expect(tab.page.locator(".message")).to_have_count(0)
    assert all(chat["messages"][0]["role"] == "user" for chat in stored_chats(tab))


def test_chat_is_renamed_and_deleted_by_keyboard(open_tab: Any, fake: str) -> None:
    tab = open_tab(fake)
    keyboard = tab.page.keyboard
    tab.ask("hello")
    action(tab, "Rename").press("Enter")
    keyboard.type("<b>Greeting</b>")
    keyboard.press("Enter")
    titles = tab.page.locator("#chat-list .chat")
    expect(titles).to_have_text("<b>Greeting</b>")
    expect(action(tab, "Rename")).to_be_focused()
    keyboard.press("Enter")
    keyboard.type("no")
    keyboard.press("Escape")
    expect(titles).to_have_text("<b>Greeting</b>")
    expect(action(tab, "Rename")).to_be_focused()
    delete = action(tab, "Delete")
    delete.press("Enter")
    dialog = tab.page.get_by_role("dialog", name="Delete?")
    expect(dialog).to_contain_text("“<b>Greeting</b>” is deleted from this browser")
    expect(tab.page.get_by_role("button", name="Cancel")).to_be_focused()
    keyboard.press("Escape")
    expect(dialog).to_be_hidden()
    expect(delete).to_be_focused()
    keyboard.press("Enter")
    keyboard.press("Tab")
    keyboard.press("Enter")
    expect(titles).to_have_count(0)
    expect(tab.page.locator(".message")).to_have_count(0)
    expect(tab.page.locator("#prompt")).to_be_focused()
    assert stored_chats(tab) == []


def test_canceled_deletion_does_not_answer_the_next(open_tab: Any, fake: str) -> None:
    tab = open_tab(fake)
    tab.ask("hello")
    # One task: the `close` event of the first dialog arrives when the second is open.
    action(tab, "Delete").evaluate(
        """button => {
            const dialog = document.querySelector("#delete-dialog");
            button.click();
            dialog.close();
            button.click();
        }"""
    )
    tab.page.locator("#delete-dialog").get_by_role("button", name="Delete").click()
    expect(tab.page.locator("#chat-list .chat")).to_have_count(0)


def test_deleted_chat_stays_deleted_when_its_answer_ends(open_tab: Any, fake: str) -> None:
    tab = open_tab(fake)
    tab.send("x" * 300)
    expect(tab.page.locator(".answer")).to_contain_text("You said: XX")
    action(tab, "Delete").click()
    tab.page.locator("#delete-dialog").get_by_role("button", name="Delete").click()
    expect(tab.page.locator("#chat-list .chat")).to_have_count(0)
    tab.ask("hello")
    expect(tab.page.locator("#chat-list .chat")).to_have_text("hello")
    assert [chat["title"] for chat in stored_chats(tab)] == ["hello"]


def test_delete_all_removes_every_chat(open_tab: Any, fake: str) -> None:
    tab = open_tab(fake)
    for text in ("one", "two"):
        tab.page.click("#new-chat")
        tab.ask(text)
    tab.page.click("#delete-all")
    expect(tab.page.locator("#delete-what")).to_contain_text("All 2 conversations")
    tab.page.locator("#delete-dialog").get_by_role("button", name="Delete").click()
    expect(tab.page.locator("#chat-list li")).to_have_count(0)
    expect(tab.page.locator("#delete-all")).to_be_hidden()
    assert stored_chats(tab) == []


def test_another_chat_ends_the_answer_and_keeps_its_begin(open_tab: Any, fake: str) -> None:
    tab = open_tab(fake)
    tab.ask("short")
    tab.page.click("#new-chat")
    tab.send("x" * 600)
    expect(tab.page.locator(".answer")).to_contain_text("You said: XX")
    tab.page.locator("#chat-list .chat").nth(1).click()
    expect(tab.page.locator(".answer")).to_have_attribute("aria-busy", "false")
    expect(tab.page.locator("#send")).to_have_text("Send")
    expect(answers(tab)).to_have_text("You said: SHORT")
    tab.page.locator("#chat-list .chat").filter(has_text="xx").click()
    expect(tab.page.locator(".answer .stats")).to_contain_text("stopped")
    expect(tab.page.locator(".answer .body")).to_contain_text("You said: XX")


def test_reload_keeps_the_begin_of_an_answer(open_tab: Any, fake: str) -> None:
    tab = open_tab(fake)
    tab.send("x" * 600)
    expect(tab.page.locator(".answer")).to_contain_text("You said: XX")
    tab.page.evaluate(
        "Object.defineProperty(document, 'hidden', { value: true });"
        "document.dispatchEvent(new Event('visibilitychange'))"
    )
    tab.page.wait_for_timeout(200)
    tab.page.reload()
    expect(tab.page.locator(".answer .body")).to_contain_text("You said: XX")
    expect(tab.page.locator(".answer .stats")).to_contain_text("stopped")
    tab.page.get_by_role("button", name="Regenerate").click()
    tab.wait_for_answer()
    assert versions(tab) == ["2/2"]


def test_two_tabs_share_the_list_and_lose_no_message(open_tab: Any, fake: str) -> None:
    tab = open_tab(fake)
    tab.ask("hello")
    other = tab.context.new_page()
    other.goto(fake)
    other.locator("#chat-list .chat").click()
    expect(other.locator(".answer .rendered")).to_have_text("You said: HELLO")
    other.fill("#prompt", "from the other")
    other.keyboard.press("Enter")
    expect(other.locator(".answer .rendered")).to_have_count(2)
    tab.ask("from this")
    expect(tab.page.locator(".message")).to_have_count(4)
    other.close()
    (chat,) = stored_chats(tab)
    questions = {m["content"] for m in chat["messages"] if m["role"] == "user"}
    assert questions == {"hello", "from the other", "from this"}
    tab.page.reload()
    tab.page.get_by_role("button", name="version").filter(visible=True).first.wait_for()
    assert versions(tab) == ["2/2"] or versions(tab) == ["1/2"]


def test_edit_and_regenerate_keep_the_old_versions(open_tab: Any, fake: str) -> None:
    tab = open_tab(fake)
    keyboard = tab.page.keyboard
    for text in ("one", "two"):
        tab.ask(text)
    tab.page.locator(".question").first.get_by_role("button", name="Edit").click()
    tab.page.fill(".edit textarea", "changed")
    keyboard.press("Enter")
    tab.wait_for_answer()
    tab.page.get_by_role("button", name="Regenerate").click()
    tab.wait_for_answer()
    assert versions(tab) == ["2/2", "2/2"]
    expect(answers(tab)).to_have_text("You said: CHANGED")
    arrows = tab.page.locator(".question").first.get_by_role("button", name="Previous version")
    arrows.press("Enter")
    expect(answers(tab)).to_have_text(["You said: ONE", "You said: TWO"])
    assert versions(tab) == ["1/2"]
    expect(tab.page.get_by_role("button", name="Previous version")).to_be_disabled()
    expect(tab.page.get_by_role("button", name="Next version")).to_be_focused()
    expect(tab.page.get_by_role("group", name="Version 1 of 2")).to_be_visible()
    keyboard.press("Enter")
    expect(answers(tab)).to_have_text("You said: CHANGED")
    assert versions(tab) == ["2/2", "2/2"]  # the answer that was shown before is shown again
    tab.page.reload()
    expect(answers(tab)).to_have_text("You said: CHANGED")
    assert versions(tab) == ["2/2", "2/2"]
    bodies = answer_with(tab, chunk({"content": "Hi."}, "stop"))
    tab.ask("more")
    sent = [message["content"] for message in bodies[0]["messages"]]
    assert sent == ["changed", "You said: CHANGED", "more"]


def test_answer_that_failed_is_replaced(open_tab: Any, fake: str) -> None:
    tab = open_tab(fake)
    answer_with(tab, {"error": {"code": 500, "message": "Broken."}})
    tab.ask("hello")
    tab.page.unroute(CHAT)
    tab.page.get_by_role("button", name="Regenerate").click()
    expect(answers(tab)).to_have_text("You said: HELLO")
    assert versions(tab) == [] and tab.texts(".answer .error") == []


def test_chat_is_exported_with_its_versions(open_tab: Any, fake: str) -> None:
    tab = open_tab(fake)
    tab.ask("What/is this?")
    tab.page.locator(".question").get_by_role("button", name="Edit").click()
    tab.page.fill(".edit textarea", "And that?")
    tab.page.keyboard.press("Enter")
    tab.wait_for_answer()
    name, text = downloaded(tab, "Markdown")
    assert name == "What-is-this.md"
    assert text == (
        "# What/is this?\n\n## Question\n\nAnd that?\n\n## Answer\n\nYou said: AND THAT?\n"
    )
    name, text = downloaded(tab, "JSON")
    assert name == "What-is-this.json"
    chat = json.loads(text)
    assert [m["content"] for m in chat["messages"]] == [
        *("What/is this?", "You said: WHAT/IS THIS?", "And that?", "You said: AND THAT?"),
    ]
    assert chat["first"] == chat["messages"][2]["id"]


def test_full_browser_is_told_and_the_chat_can_be_exported(open_tab: Any, fake: str) -> None:
    tab = open_tab(fake)
    full = {"id": "f", "title": "full", "updated": 1, "bytes": 64 << 20, "messages": []}
    tab.page.evaluate(PUT, full)
    tab.ask("hello")
    problem = tab.page.get_by_role("alert").filter(has_text="are full")
    expect(problem).to_have_text(
        "The 64 MiB for conversations in this browser are full. Delete some, or export this one. "
        "What is new is lost when the page is closed."
    )
    assert downloaded(tab, "Markdown")[1].endswith("You said: HELLO\n")
    assert [chat["id"] for chat in stored_chats(tab)] == ["f"]
    tab.page.locator("#chat-list .chat").nth(1).click()
    action(tab, "Delete").click()
    tab.page.locator("#delete-dialog").get_by_role("button", name="Delete").click()
    tab.ask("again")
    expect(problem).to_have_count(0)
    assert [chat["title"] for chat in stored_chats(tab)] == ["again"]


def test_page_works_without_a_store(open_tab: Any, fake: str) -> None:
    tab = open_tab(fake)
    tab.page.add_init_script(
        "indexedDB.open = () => { throw new DOMException('It is off.', 'SecurityError'); }"
    )
    tab.page.reload()
    tab.ask("hello")
    expect(answers(tab)).to_have_text("You said: HELLO")
    expect(tab.page.locator("#store-problem")).to_contain_text("keeps no conversations: It is off.")


def test_files_are_sent_as_text_of_the_question(open_tab: Any, fake: str) -> None:
    tab = open_tab(fake)
    bodies = answer_with(tab, chunk({"content": "Hi."}, "stop"))
    files = [
        {"name": "a.md", "mimeType": "text/markdown", "buffer": b"```\n<b>code</b>\n```\n"},
        {"name": "b.txt", "mimeType": "", "buffer": "ä".encode()},
        {"name": "c.txt", "mimeType": "", "buffer": b"c"},
    ]
    tab.page.set_input_files("#file-input", files)
    chips = tab.page.get_by_role("list", name="Attached files").get_by_role("listitem")
    expect(chips).to_have_text(["a.md20 B×", "b.txt2 B×", "c.txt1 B×"])
    tab.page.get_by_role("button", name="Remove c.txt").press("Enter")
    expect(chips).to_have_count(2)
    expect(tab.page.get_by_role("button", name="Remove a.md")).to_be_focused()
    tab.ask("Read.")
    sent = "Read.\n\nFile `a.md`:\n````\n```\n<b>code</b>\n```\n````\n\nFile `b.txt`:\n```\nä\n```"
    assert bodies[0]["messages"] == [{"role": "user", "content": sent}]
    expect(chips).to_have_count(0)
    assert tab.texts(".question .text") == ["Read."]
    cut = "(all) => all.filter((each) => each.scrollWidth > each.clientWidth).length"
    assert tab.page.locator(".file-name").evaluate_all(cut) == 0
    chip = tab.page.locator(".file summary").first
    chip.press("Enter")
    expect(tab.page.locator(".file pre").first).to_have_text("```\n<b>code</b>\n```\n")
    tab.page.reload()
    expect(tab.page.locator(".file summary")).to_have_text(["a.md20 B", "b.txt2 B"])
    tab.page.get_by_role("button", name="Edit").click()
    tab.page.fill(".edit textarea", "Again.")
    tab.page.keyboard.press("Enter")
    tab.wait_for_answer()
    assert bodies[1]["messages"][0]["content"] == sent.replace("Read.", "Again.", 1)


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"x" * (256 * 1024 + 1), "x.bin has 256.0 KiB. A file may have 256.0 KiB."),
        (b"\xff\xfe", "x.bin is no text file in UTF-8."),
        (b"a\x00b", "x.bin is no text file in UTF-8."),
    ],
)
def test_files_that_are_no_text_or_large_are_refused(
    open_tab: Any, fake: str, data: bytes, problem: str
) -> None:
    tab = open_tab(fake)
    tab.page.set_input_files("#file-input", [{"name": "x.bin", "mimeType": "", "buffer": data}])
    expect(tab.page.locator("#status")).to_have_text(problem)
    expect(tab.page.locator("#files li")).to_have_count(0)


def test_a_ninth_file_is_refused(open_tab: Any, fake: str) -> None:
    tab = open_tab(fake)
    files = [{"name": f"{i}.txt", "mimeType": "", "buffer": b"x"} for i in range(9)]
    tab.page.set_input_files("#file-input", files)
    expect(tab.page.locator("#status")).to_have_text("A message may have 8 files.")
    expect(tab.page.locator("#files li")).to_have_count(8)
