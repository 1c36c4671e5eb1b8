/* A stand-in for NVIDIA's management library: cards that are not there, with the memory, name and driver that the
   environment says. It stands for no driver's behaviour but the answers below. */
#include <stdlib.h>
#include <string.h>

typedef struct { unsigned long long total, free, used; } memory_t;

static unsigned int cards(void) { return (unsigned int)atoi(getenv("STANDIN_GPUS")); }

int nvmlInit_v2(void) { return 0; }
int nvmlInitWithFlags(unsigned int flags) { (void)flags; return 0; }
int nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(int code) { (void)code; return "stand-in"; }

int nvmlDeviceGetHandleByIndex_v2(unsigned int index, void **handle) {
    *handle = (void *)(size_t)(index + 1);
    return index < cards() ? 0 : 2; /* invalid argument */
}

int nvmlDeviceGetMemoryInfo(void *handle, memory_t *found) {
    (void)handle;
    found->total = 80ULL << 30;
    found->free = strtoull(getenv("STANDIN_FREE"), NULL, 10);
    found->used = found->total - found->free;
    return 0;
}

int nvmlDeviceGetName(void *handle, char *name, unsigned int length) {
    (void)handle;
    strncpy(name, getenv("STANDIN_NAME"), length);
    return 0;
}

int nvmlSystemGetDriverVersion(char *version, unsigned int length) {
    strncpy(version, getenv("STANDIN_DRIVER"), length);
    return 0;
}
