/* Just enough JSON for a facts file: objects, arrays, strings without \u, integers, true, false, null. */
#ifndef ATTNPROBE_STUB_JSON_H
#define ATTNPROBE_STUB_JSON_H

typedef struct json json;

struct json {
    enum { JSON_NULL, JSON_NUMBER, JSON_STRING, JSON_ARRAY, JSON_OBJECT } kind;
    long long number; /* of a number; 1 and 0 of true and false */
    char *text;       /* of a string */
    char *name;       /* of a member: its key */
    json *first;      /* of an array or object: the first element, or NULL */
    json *next;       /* the element behind this one, or NULL */
};

/* The file that an environment variable names. Ends the process with a message if it cannot be read. */
const json *json_from_environment(const char *variable);

/* A member or NULL; of NULL, NULL: lookups can be chained. */
const json *json_member(const json *object, const char *name);

/* An element by position, or NULL. */
const json *json_element(const json *array, int index);

/* How many elements there are; 0 of NULL. */
int json_length(const json *array);

/* The number of a member, or `otherwise` where there is none. */
long long json_number(const json *object, const char *name, long long otherwise);

/* The text of a member, or `otherwise` where there is none. */
const char *json_text(const json *object, const char *name, const char *otherwise);

#endif
