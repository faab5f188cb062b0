/* The machine of a facts file, as both stubs see it. tests/facts/README.md describes the file. */
#ifndef ATTNPROBE_STUB_MACHINE_H
#define ATTNPROBE_STUB_MACHINE_H

#include "json.h"

/* The facts that ATTNPROBE_STUB_FACTS names, read once. */
const json *machine(void);

/* What a function is to return instead of doing its work: the code under `fail` of the GPU (if there is
 * one) or of the machine, else 0. The word "hang" stands for a call that never returns, and ignores all
 * signals that can be ignored, as a call stuck in the kernel module does. */
int failure(const char *function, const json *gpu);

/* The 16 bytes of a text like GPU-01234567-89ab-... or MIG-... */
void uuid_bytes(const char *text, unsigned char bytes[16]);

#endif
