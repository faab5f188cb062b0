/* A recursive reader. A facts file is ours: anything unexpected ends the process with a message. */
#include "json.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    const char *at; /* the next character */
} reader;

static json *read_value(reader *r);

static void fail(const char *what, const char *detail) {
    fprintf(stderr, "stub: %s: %.40s\n", what, detail);
    exit(70);
}

static void skip_blanks(reader *r) {
    while (*r->at == ' ' || *r->at == '\n' || *r->at == '\t' || *r->at == '\r') r->at++;
}

static int accept(reader *r, char character) {
    skip_blanks(r);
    if (*r->at != character) return 0;
    r->at++;
    return 1;
}

static void expect(reader *r, char character) {
    if (!accept(r, character)) fail("unexpected in JSON", r->at);
}

static json *make(int kind) {
    json *value = calloc(1, sizeof *value);
    if (!value) fail("no memory", "");
    value->kind = kind;
    return value;
}

static char *read_string(reader *r) {
    expect(r, '"');
    const char *start = r->at;
    size_t length = strcspn(start, "\"");
    char *copy = malloc(length + 1), *end = copy;
    if (!copy) fail("no memory", "");
    for (; *r->at && *r->at != '"'; r->at++) {
        if (*r->at == '\\') fail("no escapes in a facts file", r->at);
        *end++ = *r->at;
    }
    *end = 0;
    expect(r, '"');
    return copy;
}

/* Elements up to `close`; with keys if it closes an object. */
static json *read_elements(reader *r, int kind, char close) {
    json *holder = make(kind), **tail = &holder->first;
    if (accept(r, close)) return holder;
    do {
        char *name = NULL;
        if (kind == JSON_OBJECT) {
            name = read_string(r);
            expect(r, ':');
        }
        *tail = read_value(r);
        (*tail)->name = name;
        tail = &(*tail)->next;
    } while (accept(r, ','));
    expect(r, close);
    return holder;
}

static json *read_word(reader *r) {
    static const struct {
        const char *word;
        int kind, number;
    } words[] = {{"true", JSON_NUMBER, 1}, {"false", JSON_NUMBER, 0}, {"null", JSON_NULL, 0}};
    for (size_t i = 0; i < sizeof words / sizeof *words; i++) {
        size_t length = strlen(words[i].word);
        if (!strncmp(r->at, words[i].word, length)) {
            json *value = make(words[i].kind);
            value->number = words[i].number;
            r->at += length;
            return value;
        }
    }
    fail("no JSON value", r->at);
    return NULL;
}

static json *read_value(reader *r) {
    skip_blanks(r);
    if (accept(r, '{')) return read_elements(r, JSON_OBJECT, '}');
    if (accept(r, '[')) return read_elements(r, JSON_ARRAY, ']');
    if (*r->at == '"') {
        json *value = make(JSON_STRING);
        value->text = read_string(r);
        return value;
    }
    if (*r->at == '-' || (*r->at >= '0' && *r->at <= '9')) {
        char *end;
        json *value = make(JSON_NUMBER);
        value->number = strtoll(r->at, &end, 10);
        r->at = end;
        return value;
    }
    return read_word(r);
}

static char *read_whole(const char *path) {
    FILE *file = fopen(path, "rb");
    if (!file) fail("cannot read", path);
    fseek(file, 0, SEEK_END);
    long size = ftell(file);
    rewind(file);
    char *text = malloc((size_t)size + 1);
    if (!text || fread(text, 1, (size_t)size, file) != (size_t)size) fail("cannot read", path);
    fclose(file);
    text[size] = 0;
    return text;
}

const json *json_from_environment(const char *variable) {
    const char *path = getenv(variable);
    if (!path) fail("not set", variable);
    reader r = {read_whole(path)};
    return read_value(&r);
}

const json *json_member(const json *object, const char *name) {
    if (!object || object->kind != JSON_OBJECT) return NULL;
    for (const json *one = object->first; one; one = one->next)
        if (!strcmp(one->name, name)) return one;
    return NULL;
}

const json *json_element(const json *array, int index) {
    if (!array || index < 0) return NULL;
    const json *one = array->first;
    while (one && index--) one = one->next;
    return one;
}

int json_length(const json *array) {
    int length = 0;
    for (const json *one = array ? array->first : NULL; one; one = one->next) length++;
    return length;
}

long long json_number(const json *object, const char *name, long long otherwise) {
    const json *member = json_member(object, name);
    return member && member->kind == JSON_NUMBER ? member->number : otherwise;
}

const char *json_text(const json *object, const char *name, const char *otherwise) {
    const json *member = json_member(object, name);
    return member && member->kind == JSON_STRING ? member->text : otherwise;
}
