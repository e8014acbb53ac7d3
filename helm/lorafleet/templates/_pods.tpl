{{/* Common parts of all pods. Restricted Pod Security: only the ids are settings. */}}

{{- define "lorafleet.podSecurity" -}}
runAsNonRoot: true
{{- with .Values.security }}
{{ toYaml . }}
{{- end }}
fsGroupChangePolicy: OnRootMismatch
seccompProfile:
  type: RuntimeDefault
{{- end }}

{{- define "lorafleet.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end }}

{{/* (dict "root" $ "given" .Values.router "component" "router" "pool" ""): scheduling of the pod, and its image's pull secrets. */}}
{{- define "lorafleet.scheduling" -}}
{{- with concat .root.Values.imagePullSecrets (include "lorafleet.secretNames" .root.Values.global.imagePullSecrets | fromJsonArray) | uniq }}
imagePullSecrets:
{{- range . }}
  - name: {{ . | quote }}
{{- end }}
{{- end }}
{{- with .given.priorityClassName }}
priorityClassName: {{ . | quote }}
{{- end }}
{{- with .given.runtimeClassName }}
runtimeClassName: {{ . | quote }}
{{- end }}
{{- with .given.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .given.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .given.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
topologySpreadConstraints:
{{- if .given.topologySpreadConstraints }}
  {{- toYaml .given.topologySpreadConstraints | nindent 2 }}
{{- else }}
{{- $selector := include "lorafleet.selector" . }}
{{- range list "topology.kubernetes.io/zone" "kubernetes.io/hostname" }}
  - maxSkew: 1
    topologyKey: {{ . }}
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        {{- $selector | nindent 8 }}
{{- end }}
{{- end }}
{{- end }}

{{/* `scheme: HTTPS` of a probe, where the services have certificates; kubelets check none. */}}
{{- define "lorafleet.probeScheme" -}}
{{- if .Values.tls.enabled }}scheme: HTTPS{{ end -}}
{{- end }}

{{/* Secret with a service's tls.crt, tls.key and ca.crt. (dict "root" $ "service" "router") */}}
{{- define "lorafleet.tlsSecret" -}}
{{- get .root.Values.tls.secretNames .service | default (printf "%s-tls-%s" (include "lorafleet.fullname" .root) .service) -}}
{{- end }}

{{/* Settings of a service's certificate. (dict "root" $ "prefix" "LORAFLEET_ROUTER_") */}}
{{- define "lorafleet.tlsEnv" -}}
{{- if .root.Values.tls.enabled -}}
- name: {{ .prefix }}TLS_CERT
  value: /etc/lorafleet/tls/tls.crt
- name: {{ .prefix }}TLS_KEY
  value: /etc/lorafleet/tls/tls.key
- name: {{ .prefix }}TLS_CA
  value: /etc/lorafleet/tls/ca.crt
{{- end -}}
{{- end }}

{{/* How a monitor checks a service's certificate. (dict "root" $ "service" "router") */}}
{{- define "lorafleet.scrapeTls" -}}
{{- if .root.Values.tls.enabled -}}
scheme: https
tlsConfig:
  ca:
    secret:
      name: {{ include "lorafleet.tlsSecret" . | quote }}
      key: ca.crt
  serverName: {{ .service }}.lorafleet.internal
{{- end -}}
{{- end }}

{{/* Alive while it answers. A busy process is not dead, so a restart needs a minute of silence. */}}
{{- define "lorafleet.liveness" -}}
livenessProbe:
  httpGet:
    path: /health
    port: {{ .port }}
    {{- with include "lorafleet.probeScheme" .root }}
    {{- . | nindent 4 }}
    {{- end }}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
{{- end }}

{{/* (dict "prefix" "LORAFLEET_ROUTER_" "settings" map): settings by their own names, as JSON unless they are strings. */}}
{{- define "lorafleet.settings" -}}
{{- $prefix := .prefix }}
{{- range $name, $value := .settings }}
- name: {{ $prefix }}{{ upper $name }}
  value: {{ ternary $value (toJson $value) (kindIs "string" $value) | quote }}
{{- end }}
{{- end }}

{{/* A pod's zone and node. Before Kubernetes 1.35 a pod does not know its zone and the label is empty: EndpointSlices have it. */}}
{{- define "lorafleet.whereabouts" -}}
- name: POD_NAME
  valueFrom:
    fieldRef:
      fieldPath: metadata.name
- name: POD_IP
  valueFrom:
    fieldRef:
      fieldPath: status.podIP
{{- end }}

{{- define "lorafleet.zone" -}}
valueFrom:
  fieldRef:
    fieldPath: metadata.labels['topology.kubernetes.io/zone']
{{- end }}

{{/* A monitor's credentials for `/metrics`, if that needs a key. */}}
{{- define "lorafleet.scrapeKey" -}}
{{- if .Values.monitoring.needKey -}}
authorization:
  credentials:
    name: {{ include "lorafleet.tokensSecret" . | quote }}
    key: {{ include "lorafleet.tokenKey" (dict "root" . "role" "metrics") }}
{{- end -}}
{{- end }}

{{/* The service's own token, the one that it sends to agents, and its files of hashes, mounted whole so that a change arrives without a restart.
(dict "root" $ "service" "router") */}}
{{- define "lorafleet.keyVolumes" -}}
{{- if .root.Values.tls.enabled -}}
- name: tls
  secret:
    secretName: {{ include "lorafleet.tlsSecret" . | quote }}
    defaultMode: 0440
{{ end -}}
- name: token
  secret:
    secretName: {{ include "lorafleet.tokensSecret" .root | quote }}
    items:
      - key: {{ include "lorafleet.tokenKey" (dict "root" .root "role" .service) }}
        path: token
      {{- if ne .service "worker" }}
      - key: {{ include "lorafleet.tokenKey" (dict "root" .root "role" (printf "%s-agents" .service)) }}
        path: agent-token
      {{- end }}
    defaultMode: 0440
- name: keys
  secret:
    {{- if .root.Values.auth.existingSecret }}
    secretName: {{ .root.Values.auth.existingSecret | quote }}
    items:
      - key: {{ .service }}-keys.yaml
        path: keys.yaml
    {{- else }}
    secretName: {{ include "lorafleet.fullname" .root }}-keys-{{ .service }}
    {{- end }}
    defaultMode: 0440
{{- if include "lorafleet.hasGivenKeys" . }}
- name: keys-given
  secret:
    secretName: {{ include "lorafleet.fullname" .root }}-keys-{{ .service }}
    defaultMode: 0440
{{- end }}
{{- if ne .service "worker" }}
{{- range $index, $name := .root.Values.auth.existingKeySecrets }}
- name: keys-{{ $index }}
  secret:
    secretName: {{ $name | quote }}
    defaultMode: 0440
{{- end }}
{{- end }}
{{- end }}

{{- define "lorafleet.keyMounts" -}}
{{- if .root.Values.tls.enabled -}}
- name: tls
  mountPath: /etc/lorafleet/tls
  readOnly: true
{{ end -}}
- name: token
  mountPath: /etc/lorafleet/token
  readOnly: true
- name: keys
  mountPath: /etc/lorafleet/keys
  readOnly: true
{{- if include "lorafleet.hasGivenKeys" . }}
- name: keys-given
  mountPath: /etc/lorafleet/keys-given
  readOnly: true
{{- end }}
{{- if ne .service "worker" }}
{{- range $index, $name := .root.Values.auth.existingKeySecrets }}
- name: keys-{{ $index }}
  mountPath: /etc/lorafleet/keys-{{ $index }}
  readOnly: true
{{- end }}
{{- end }}
{{- end }}

{{- define "lorafleet.keyFiles" -}}
{{- $files := list "/etc/lorafleet/keys/keys.yaml" -}}
{{- if include "lorafleet.hasGivenKeys" . -}}
{{- $files = append $files "/etc/lorafleet/keys-given/keys.yaml" -}}
{{- end -}}
{{- if ne .service "worker" -}}
{{- range $index, $name := .root.Values.auth.existingKeySecrets -}}
{{- $files = append $files (printf "/etc/lorafleet/keys-%d/keys.yaml" $index) -}}
{{- end -}}
{{- end -}}
{{- toJson $files | squote -}}
{{- end }}
